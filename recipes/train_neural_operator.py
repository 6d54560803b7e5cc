"""Train a neural operator on Darcy flow with its saved activations in host memory.

    accelerate launch recipes/train_neural_operator.py --output_dir outputs/darcy_fno
    accelerate launch --mixed_precision bf16 recipes/train_neural_operator.py --model tfno --resolution 512 \\
        --test_resolutions 512 --batch_size 16 --checkpoint_blocks --checkpoint_mlps --offload inputs

Models, losses, data processor and optimizer are neuralop's. Data are generated, unless --data_folder has neuralop's
files; nothing is downloaded. Trained at one resolution, the model is tested at several.

Devices, processes and mixed precision are accelerate's; Fourier transforms stay in float32. On a CPU nothing is
offloaded unless --cpu_copies asks for the copies. @FILE stands for the flags in a file, one per line.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm
from neuralop.training import AdamW
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import get_scheduler

from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.recipes.causal_lm.model import make_offloader
from hf_memopt.recipes.common import auto_plan, loop
from hf_memopt.recipes.common.cost import Cost, Meter, announce, explain_idleness
from hf_memopt.recipes.common.loop import lock_output, open_checkpoints, record, save_and_stop, set_up_logging
from hf_memopt.recipes.neural_operator import data as data
from hf_memopt.recipes.neural_operator import report as report
from hf_memopt.recipes.neural_operator.evaluation import LOSSES, evaluate
from hf_memopt.recipes.neural_operator.model import make_model, save_model
from hf_memopt.recipes.neural_operator.options import Options, TrainingOptions, parse

logger = logging.getLogger("hf_memopt.recipes.train_neural_operator")

Batch = dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what is written to `results.json`."""
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    set_up_logging(accelerator)
    lock = lock_output(accelerator, options.training.output_dir)
    with accelerator.main_process_first():  # the others find the files
        samples = data.load(options.data, accelerator.device)
    logger.info(
        f"Data: Darcy flow, {data.describe(options.data)}; {len(samples.train):,} samples at "
        f"{options.data.resolution}, tested at {', '.join(map(str, samples.tests))}"
    )
    options, accelerator, predicted = auto_plan.applied(
        options, accelerator, partial(workload, options), make_accelerator
    )
    with logging_redirect_tqdm():
        costs = [measure(mode, options, samples) for mode in options.offload.compared_modes]
        if options.training.loop == "neuralop":
            from hf_memopt.recipes.neural_operator.trainer import train_with_trainer

            loaders = make_loaders(options.training.batch_size, samples)
            model, history, cost = train_with_trainer(options, samples, loaders, accelerator)
        else:
            run = prepare(accelerator, options.offload.offload, options, samples)
            cost = train(run, options)
            model, history = accelerator.unwrap_model(run.model), run.progress.history
    results = report.results(options, accelerator, model, history, cost, costs)
    auto_plan.compare(predicted, accelerator)
    explain_idleness(results, options.offload)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(options.training.output_dir).mkdir(parents=True, exist_ok=True)
        save_model(model, options.training.output_dir)
        report.write(results, model, samples, Path(options.training.output_dir))
    lock.release()
    accelerator.end_training()
    return results


def workload(options: Options, precision: str) -> auto_plan.RecipeWorkload:
    """What `--plan` simulates; its module runs the functions of this one."""
    from hf_memopt.recipes.neural_operator.plan import NeuralOperator

    return NeuralOperator(options, precision=precision)


def make_accelerator(options: Options) -> Accelerator:
    accelerator = loop.make_accelerator(options.training)
    accelerator.register_save_state_pre_hook(drop_metadata)
    return accelerator


def drop_metadata(models: list[nn.Module], states: list[dict[str, Any]], folder: str) -> None:
    """neuralop puts the arguments that made a model into its state dict, and torch loads nothing but tensors safely."""
    for state in states:
        state.pop("_metadata", None)


@dataclass(kw_only=True)
class Run(loop.Run):
    """What accelerate prepared, the offloader, and what an update and an evaluation need besides."""

    tests: dict[int, DataLoader[Any]]
    processor: Any
    train_loss: str
    micro_batch_size: int
    epoch_loss: Tensor  # sum over the epoch's updates so far, (), on the device

    def position(self) -> dict[str, Any]:
        """With the mean over processes, whose own sums are not kept."""
        return {**super().position(), "epoch_loss": self.accelerator.reduce(self.epoch_loss, "mean").item()}

    def restore(self, position: dict[str, Any]) -> None:
        self.epoch_loss.fill_(position.pop("epoch_loss"))
        super().restore(position)


def prepare(accelerator: Accelerator, mode: str, options: Options, samples: data.Data) -> Run:
    """Model, optimizer, schedule and batches, the same for every call."""
    training = options.training
    set_seed(training.seed)
    model = make_model(options.model)
    optimizer = AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    batches, *tests = accelerator.prepare(*make_loaders(training.batch_size, samples))
    # accelerate steps the schedule once per process.
    scheduler = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.warmup_steps * accelerator.num_processes,
        num_training_steps=training.epochs * len(batches) * accelerator.num_processes,
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return Run(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        offloader=make_offloader(mode, options.offload, accelerator.device),
        mode=mode,
        tests=dict(zip(samples.tests, tests, strict=True)),
        processor=samples.processor.to(accelerator.device),
        train_loss=training.train_loss,
        micro_batch_size=training.micro_batch_size or training.batch_size,
        epoch_loss=torch.zeros((), device=accelerator.device),
    )


def make_loaders(batch_size: int, samples: data.Data) -> list[DataLoader[Any]]:
    """Of the training samples, shuffled, and of each test resolution's."""
    # A generator of its own keeps each loader from drawing from the global one, so that resuming is exact.
    train = DataLoader(samples.train, batch_size, shuffle=True, generator=torch.Generator())
    return [train, *(DataLoader(test, batch_size, generator=torch.Generator()) for test in samples.tests.values())]


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """A batch in parts of `size` samples; the last one may be smaller."""
    parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def update(run: Run, batch: Batch) -> Tensor:
    """One update of the weights; returns the batch's mean loss, on the device.

    A sample's relative error is its own, so that micro-batches give the gradient of the whole batch up to rounding.
    """
    batch = run.processor.preprocess(batch)
    parts = micro_batches(batch, run.micro_batch_size)
    losses = []
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else run.accelerator.no_sync(run.model):
            with run.saving():
                output, part = run.processor.postprocess(run.model(part["x"]), part)
                loss = LOSSES[run.train_loss](output, part["y"]) / len(batch["y"])
            run.accelerator.backward(loss)
        losses.append(loss.detach())
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    run.progress.num_updates += 1
    return torch.stack(losses).sum()


def train(run: Run, options: Options) -> Cost:
    """The training loop: epochs of updates, evaluations, checkpoints. Returns what an update cost."""
    training, accelerator = options.training, run.accelerator
    announce(run.mode, report.num_parameters(run.model), options, accelerator)
    accelerator.init_trackers("neural_operator", config=options.settings)
    # Loading safetensors would compare them with the model's own state dict, in which neuralop's metadata are.
    checkpoints = open_checkpoints(run, training, safe_serialization=False)
    progress = run.progress
    run.model.train()
    run.processor.train()
    batches = endless_batches(accelerator, run.batches, progress.num_updates)
    meter = Meter(run.mode, accelerator.device, run.offloader)
    num_updates = training.epochs * len(run.batches)
    bar = tqdm(total=num_updates, initial=progress.num_updates, unit="update", desc="Training")
    with bar, checkpoints.stopping_on_signal():
        while progress.num_updates < num_updates:
            meter.begin()
            run.epoch_loss += update(run, next(batches))
            meter.end()
            bar.update()
            if progress.num_updates % len(run.batches) == 0:
                end_epoch(run, training)
            if save_and_stop(run, checkpoints, training.checkpointing_steps):
                break
    return meter.cost()


def end_epoch(run: Run, training: TrainingOptions) -> None:
    """Mean training loss, and test errors where they are due."""
    epoch = run.progress.num_updates // len(run.batches)
    figures = {"loss": run.accelerator.reduce(run.epoch_loss / len(run.batches), "mean").item()}
    run.epoch_loss.zero_()
    if epoch % training.eval_every == 0 or epoch == training.epochs:
        figures |= evaluate(run.model, run.processor, run.tests, run.accelerator)
    record(run, "epoch", epoch, figures)


def measure(mode: str, options: Options, samples: data.Data) -> Cost:
    """A short run of its own in one mode: the same weights and batches each time."""
    run = prepare(make_accelerator(options), mode, options, samples)
    run.processor.train()
    batches = endless_batches(run.accelerator, run.batches)
    return loop.measure(run, lambda: update(run, next(batches)), options.offload)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_neural_operator", main))
