"""Train style transfer in a latent space through an integrated flow, in little memory.

    accelerate launch recipes/train_lgt.py --config_path recipes/configs/lgt.json
    accelerate launch recipes/train_lgt.py --config_path recipes/configs/lgt.json --data.data_root latents \\
        --training.batch_size 240 --training.accumulation_steps 1 --training.use_gradient_checkpointing

A U-Net gives velocities; latents are moved along them in Euler steps, and the gradient goes through all steps from a
sliced Wasserstein distance (style) and a difference in self-similarity (content). Without data.data_root or
data.dataset two simple styles are generated; nothing is downloaded.

Any field of the file can be given as a flag, --section.field VALUE, with values as in JSON. Devices and processes are
accelerate's. On a CPU nothing is offloaded unless --offload.cpu_copies asks for the copies.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import tqdm
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm

from hf_memopt.checkpoint import Checkpoints, endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.recipes.common import auto_plan
from hf_memopt.recipes.common.cost import Cost, Meter, announce, explain_idleness
from hf_memopt.recipes.common.loop import lock_output, record, set_up_logging
from hf_memopt.recipes.lgt import data as data
from hf_memopt.recipes.lgt import report as report
from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.evaluation import evaluate
from hf_memopt.recipes.lgt.parsing import read_config
from hf_memopt.recipes.lgt.run import Progress, Run, make_accelerator, measure, prepare, update, window_sizes
from hf_memopt.training.compile import compile_seconds

logger = logging.getLogger("hf_memopt.recipes.train_lgt")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as file and command line say; returns what is written to `results.json`."""
    config = read_config(__doc__, arguments)
    report.check_folder(config.checkpoint)
    accelerator = make_accelerator(config)
    set_up_logging(accelerator)
    lock = lock_output(accelerator, config.checkpoint.save_dir)
    torch.backends.cudnn.benchmark = config.training.cudnn_benchmark
    train_data, held_out = data.load(config)
    logger.info(
        f"Data: {data.describe(config)}; {len(train_data.styles):,} latents of {tuple(train_data.latents.shape[1:])} "
        f"in {config.model.num_styles} styles, {len(held_out.styles):,} held out"
    )
    config, accelerator, predicted = auto_plan.applied(config, accelerator, partial(workload, config), make_accelerator)
    with logging_redirect_tqdm():
        costs = [measure(mode, config, train_data) for mode in config.offload.compared_modes]
        run = prepare(accelerator, config.offload.offload, config, train_data)
        cost = train(run, data.Latents(*(each.to(accelerator.device) for each in held_out)))
    num_positions = train_data.latents[0, 0].numel()
    results = report.results(run, cost, costs, num_positions)
    auto_plan.compare(predicted, accelerator)
    explain_idleness(results, config.offload)
    if accelerator.is_main_process:
        report.write(results, run.best_model(), run.bank, held_out, config)
    accelerator.wait_for_everyone()  # while a process is left alone, gloo can hang
    lock.release()
    accelerator.end_training()
    return results


def workload(config: Config, precision: str) -> auto_plan.RecipeWorkload:
    """What `--offload.plan` simulates."""
    from hf_memopt.recipes.lgt.plan import LatentTransferWorkload

    return LatentTransferWorkload(config, precision=precision)


def train(run: Run, held_out: data.Latents) -> Cost:
    """The training loop: updates, evaluations, checkpoints. Returns what an update cost."""
    config, progress = run.config, run.progress
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    announce(config.offload.offload, num_parameters, config, run.accelerator)
    run.accelerator.init_trackers("lgt", config=report.settings(config))
    checkpoints = Checkpoints(
        run.accelerator, Path(config.checkpoint.save_dir) / "checkpoints", config.checkpoint.keep_last
    )
    if config.checkpoint.resume_from_checkpoint is not None:
        run.progress = progress = Progress(**checkpoints.resume(config.checkpoint.resume_from_checkpoint))
        logger.info(f"Resumed after {progress.num_updates} updates")
    run.model.train()
    meter = Meter(config.offload.offload, run.accelerator.device, run.offloader)
    sizes = window_sizes(run)
    num_taken = progress.epoch * len(run.batches) + sum(sizes[: progress.num_windows])
    batches = endless_batches(run.accelerator, run.batches, num_taken)
    total = len(sizes) * config.training.num_epochs
    with (
        checkpoints.stopping_on_signal(),
        tqdm(total=total, initial=progress.num_updates, unit="update", desc="Training") as bar,
    ):
        while progress.epoch < config.training.num_epochs:
            counted(run, list(islice(batches, sizes[progress.num_windows])), meter)
            bar.update()
            epoch_ended = progress.num_windows == len(sizes)
            if epoch_ended:
                end_epoch(run, held_out)
            stop = checkpoints.stop_requested()
            if stop or (epoch_ended and due(progress.epoch, config.training.save_interval)):
                checkpoints.save(progress.num_updates, asdict(progress))
            if stop:
                logger.warning("Stopping, as asked; go on with --checkpoint.resume_from_checkpoint latest")
                run.accelerator.end_training()
                break
    return meter.cost()


def due(epoch: int, interval: int) -> bool:
    """Whether this is a multiple of the interval, of which 0 has none."""
    return interval > 0 and epoch % interval == 0


def counted(run: Run, window: list[Tensor], meter: Meter) -> None:
    """An update, and its share in the figures of the epoch."""
    progress, begun = run.progress, time.perf_counter()
    meter.begin()
    losses = update(run, window)
    meter.end()
    progress.num_windows += 1
    progress.sums = {name: progress.sums.get(name, 0.0) + value for name, value in losses.items()}
    progress.seconds += time.perf_counter() - begun


def end_epoch(run: Run, held_out: data.Latents) -> None:
    """Schedule, figures and, where one is due, evaluation."""
    progress, training = run.progress, run.config.training
    figures = {name: total / progress.num_windows for name, total in progress.sums.items()}
    figures |= {"learning_rate": run.scheduler.get_last_lr()[0], "seconds": progress.seconds}
    figures |= {"num_batches": len(run.batches)}
    run.scheduler.step()
    progress.epoch += 1
    progress.num_windows, progress.sums, progress.seconds = 0, {}, 0.0
    if training.use_compile:
        figures["compile_seconds"] = compile_seconds()
    if due(progress.epoch, training.eval_interval) or progress.epoch == training.num_epochs:
        with run.memory.phase("evaluation"):
            figures |= evaluate(run.best_model(), run.bank, held_out, run.config)
    run.memory_bytes.append(run.memory.tracker.highest_bytes)
    record(run, "epoch", progress.epoch, figures)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_lgt", main))
