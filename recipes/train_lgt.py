"""Train style transfer in a latent space through an integrated flow, in little memory.

    accelerate launch recipes/train_lgt.py --config_path recipes/configs/lgt.json
    accelerate launch recipes/train_lgt.py --config_path recipes/configs/lgt.json --data.data_root latents \\
        --training.batch_size 240 --training.accumulation_steps 1 --training.use_gradient_checkpointing

A U-Net gives velocities; latents are moved along them in Euler steps, and the gradient goes through all steps from a
sliced Wasserstein distance (style) and a difference in self-similarity (content). Without data.data_root or
data.dataset two simple styles are generated; nothing is downloaded.

Any field of the file can be given as a flag, --section.field VALUE. Devices and processes are
accelerate's. On a CPU nothing is offloaded unless --offload.disk names a folder to move it to, or
--offload.cpu_copies asks for the copies of a GPU.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import batched, cycle, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common.auto_plan import train_within_memory
from hf_memopt.recipes.common.options import check_folder
from hf_memopt.recipes.common.results import RunCost, announce
from hf_memopt.recipes.lgt import data as data
from hf_memopt.recipes.lgt import report as report
from hf_memopt.recipes.lgt.model import compile_module, compile_seconds, save_model
from hf_memopt.recipes.lgt.options import Options, parse
from hf_memopt.recipes.lgt.report import evaluate
from hf_memopt.recipes.lgt.step import Run, build_model, build_optimizer, update_weights
from hf_memopt.recipes.lgt.workload import LatentTransferWorkload

logger = logging.getLogger("hf_memopt.recipes.train_lgt")
load = data.load  # which `hf-memopt compare` calls


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(__doc__, arguments)
    saving = options.checkpoint
    check_folder(saving.save_dir, saving.resume_from_checkpoint, "checkpoint.save_dir")
    accelerator = make_accelerator(options)
    with loop.writing_to(saving.save_dir, accelerator):
        train_data, held_out = data.load(options)
        shape = tuple(train_data.latents.shape[1:])
        logger.info(
            f"Data: {data.describe(options)}; {len(train_data.styles):,} latents of {shape} in "
            f"{options.model.num_styles} styles, {len(held_out.styles):,} held out"
        )
        begin = options, accelerator, partial(LatentTransferWorkload, options), make_accelerator
        run, cost = train_within_memory(
            *begin, lambda accelerator, options: train(prepare(accelerator, options, train_data, held_out))
        )
        output, results = Path(saving.save_dir), {}
        if accelerator.is_main_process:
            save_model(run.best_model(), run.options, output)
        with loop.reporting(output):
            results = report.results(run, shape[1] * shape[2], cost)
            if accelerator.is_main_process:
                report.write(results, run, output)
        accelerator.wait_for_everyone()  # while a process is left alone, gloo can hang
    run.accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    training = options.training
    torch.backends.cudnn.benchmark = training.cudnn_benchmark
    precision = {"bfloat16": "bf16", "float16": "fp16"}[training.amp_dtype] if training.use_amp else "no"
    # The schedule is stepped once per epoch.
    settings = {"mixed_precision": precision, "step_scheduler_with_optimizer": False}
    return loop.make_accelerator(training, options.checkpoint.save_dir, **settings)


def prepare(
    accelerator: Accelerator, options: Options, train_data: data.Latents, held_out: data.Latents | None = None
) -> Run:
    """Return model, optimizer, schedule and batches, the same for every call."""
    training = options.training
    num_latents = training.batch_size * accelerator.num_processes
    if num_latents > len(train_data.styles):
        raise ValueError(
            f"training.batch_size={training.batch_size}: a batch of all processes needs {num_latents} latents, and "
            f"there are {len(train_data.styles)}; use smaller batches or more data"
        )
    set_seed(training.seed)
    model = build_model(options).to(accelerator.device)
    average = None
    if training.ema_decay is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.ema_decay))
        accelerator.register_for_checkpointing(average)
    if training.use_compile:
        compile_module(model.unet, mode=training.compile_mode, recompile_limit=training.recompile_limit)
    optimizer = build_optimizer(options, model)
    scheduler = CosineAnnealingLR(optimizer, T_max=training.num_epochs, eta_min=training.min_learning_rate)
    rows: Any = range(len(train_data.styles))
    batches = DataLoader(rows, training.batch_size, shuffle=True, drop_last=True, generator=torch.Generator())
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, batches)
    memory = MemoryLogger(accelerator, log_every=training.log_every, output_dir=options.checkpoint.save_dir)
    bank = data.LatentBank(train_data, options, accelerator.device)
    prepared = accelerator, options, model, optimizer, scheduler, batches
    return Run(*prepared, average=average, memory=memory, bank=bank, held_out=held_out)


def update(run: Run, window: list[Tensor]) -> dict[str, float]:
    """Make one update of the weights on a window of batches, given as row numbers; return its mean losses."""
    progress = run.progress
    micro_batches = run.bank.micro_batches(window, progress.num_updates, earliest_time(run.options, progress.epoch))
    with run.memory.phase("step"):
        result = update_weights(run, micro_batches)
    if run.average is not None and not result.skipped:
        run.average.update_parameters(run.accelerator.unwrap_model(run.model))
    progress.num_updates += 1
    means = run.accelerator.reduce(run.objective.take_means(), "mean")
    return {name: value.item() for name, value in means.items()} | {"grad_norm": result.grad_norm}


def earliest_time(options: Options, epoch: int) -> float:
    warmup = options.training.epsilon_warmup_epochs
    return options.training.epsilon * (1.0 if epoch >= warmup else epoch / warmup)


def window_sizes(run: Run) -> list[int]:
    return [len(window) for window in batched(range(len(run.batches)), run.options.training.accumulation_steps)]


def train(run: Run) -> tuple[Run, RunCost]:
    options, saving = run.options, run.options.checkpoint
    held_out = data.Latents(*(each.to(run.accelerator.device) for each in run.held_out))
    announce(run.model, options.offload, run.accelerator)
    run.begin("lgt", saving.keep_last, saving.resume_from_checkpoint, by_section=True)
    progress, sizes = run.progress, window_sizes(run)
    run.model.train()
    # A resumed run goes on at the batch after the last one that it was trained on.
    num_taken = progress.epoch * len(run.batches) + sum(sizes[: progress.num_windows])
    batches = endless_batches(run.accelerator, run.batches, num_taken)
    checkpointing = "" if options.training.use_gradient_checkpointing else "--use_gradient_checkpointing"
    halving = "--gradient_cache --auto_micro_batch" if not options.training.gradient_cache else "--auto_micro_batch"
    with run.updates(len(sizes) * options.training.num_epochs, checkpointing, halving):
        while progress.epoch < options.training.num_epochs:
            counted(run, list(islice(batches, sizes[progress.num_windows])))
            epoch_ended = progress.num_windows == len(sizes)
            if epoch_ended:
                end_epoch(run, held_out)
            due = epoch_ended and loop.is_due(progress.epoch, options.training.save_interval)
            if run.save_and_stop(due=due, flag="checkpoint.resume_from_checkpoint"):
                break
    return run, run.end()


def counted(run: Run, window: list[Tensor]) -> None:
    progress, begun = run.progress, time.perf_counter()
    with run.timed_update():
        losses = update(run, window)
    run.memory.log(progress.num_updates)
    progress.num_windows += 1
    progress.sums = {name: progress.sums.get(name, 0.0) + value for name, value in losses.items()}
    progress.seconds += time.perf_counter() - begun


def end_epoch(run: Run, held_out: data.Latents) -> None:
    progress, training = run.progress, run.options.training
    figures = {name: total / progress.num_windows for name, total in progress.sums.items()}
    figures |= {"learning_rate": run.scheduler.get_last_lr()[0], "seconds": progress.seconds}
    figures |= {"num_batches": len(run.batches)}
    run.scheduler.step()
    progress.epoch += 1
    progress.num_windows, progress.sums, progress.seconds = 0, {}, 0.0
    if training.use_compile:
        figures["compile_seconds"] = compile_seconds()
    if loop.is_due(progress.epoch, training.eval_interval) or progress.epoch == training.num_epochs:
        with run.memory.phase("evaluation"):
            figures |= evaluate(run.best_model(), run.bank, held_out, run.options)
    run.memory_bytes.append(run.memory.tracker.highest_bytes)
    loop.record(run, "epoch", progress.epoch, figures)


def losses(run: Run) -> Iterator[Tensor]:
    """Return the losses of endless updates, for `hf-memopt compare`."""
    run.model.train()
    batches = endless_batches(run.accelerator, run.batches)
    windows = (list(islice(batches, size)) for size in cycle(window_sizes(run)))
    return (torch.tensor(update(run, window)["loss"]) for window in windows)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_lgt", main))
