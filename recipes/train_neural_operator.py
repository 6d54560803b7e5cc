"""Train a neural operator on Darcy flow with its saved activations in host memory.

    accelerate launch recipes/train_neural_operator.py --output_dir outputs/darcy_fno
    accelerate launch --mixed_precision bf16 recipes/train_neural_operator.py --model tfno --resolution 512 \\
        --test_resolutions 512 --batch_size 16 --checkpoint_blocks --checkpoint_mlps --offload inputs

Models, losses, data processor and optimizer are neuralop's. Data are generated, unless --data_folder has files, and
nothing is downloaded. Trained at one resolution, the model is tested at several.

Devices, processes and mixed precision are accelerate's; Fourier transforms stay in float32. On a CPU nothing is
offloaded unless --disk names a folder to move it to, or --cpu_copies asks for the copies of a GPU. --config_path FILE
reads any flags from YAML or JSON.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors, script_imports
from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common.auto_plan import train_within_memory
from hf_memopt.recipes.common.results import RunCost, announce

with script_imports("train_neural_operator", __name__):
    from hf_memopt.recipes.neural_operator import data as data
    from hf_memopt.recipes.neural_operator import report as report
    from hf_memopt.recipes.neural_operator.options import Options, TrainingOptions, parse
    from hf_memopt.recipes.neural_operator.step import (
        ComplexGradScaler,
        Run,
        evaluate,
        make_model,
        make_optimizer,
        save_model,
        update,
    )
    from hf_memopt.recipes.neural_operator.workload import NeuralOperator

logger = logging.getLogger("hf_memopt.recipes.train_neural_operator")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    output = Path(options.training.output_dir)
    with loop.writing_to(output, accelerator):
        with accelerator.main_process_first():  # the others find the files
            (samples,) = load(options)
        logger.info(
            f"Data: {data.describe(options.data)}; {options.data.num_train:,} samples, {samples.shape}, tested at "
            f"{', '.join(map(str, samples.tests))}"
        )
        if options.training.loop == "neuralop":
            from hf_memopt.recipes.neural_operator.trainer import train_with_trainer

            loaders = make_loaders(options.training.batch_size, samples)
            run, cost = train_with_trainer(options, samples, loaders, accelerator)
        else:
            begin = options, accelerator, partial(NeuralOperator, options), make_accelerator
            run, cost = train_within_memory(
                *begin, lambda accelerator, options: train(prepare(accelerator, options, samples))
            )
        accelerator.wait_for_everyone()
        model, results = accelerator.unwrap_model(run.model), {}
        if accelerator.is_main_process:
            save_model(model, output)
        with loop.reporting(output):
            results = report.results(run, cost)
            if accelerator.is_main_process:
                report.write(results, model, samples, output)
    run.accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    accelerator = loop.make_accelerator(options.training, options.training.output_dir)
    accelerator.register_save_state_pre_hook(drop_metadata)
    if type(accelerator.scaler) is GradScaler:
        accelerator.scaler = ComplexGradScaler(accelerator.device.type)
    return accelerator


def load(options: Options) -> tuple[data.Data]:
    return (data.load(options.data, PartialState().device, options.model.modes),)


def drop_metadata(models: list[nn.Module], states: list[dict[str, Any]], folder: str) -> None:
    """Leave out the arguments that neuralop puts into a state dict: torch loads nothing but tensors safely."""
    for state in states:
        state.pop("_metadata", None)


def prepare(accelerator: Accelerator, options: Options, samples: data.Data) -> Run:
    """Return model, optimizer, schedule and batches, the same for every call."""
    training = options.training
    set_seed(training.seed)
    model = make_model(options.model, *samples.shape.for_model())
    optimizer = make_optimizer(model, training)
    batches, *tests = accelerator.prepare(*make_loaders(training.batch_size, samples))
    scheduler = loop.make_schedule(optimizer, training, training.epochs * len(batches), accelerator.num_processes)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    processor, tests = samples.processor.to(accelerator.device), dict(zip(samples.tests, tests, strict=True))
    memory = MemoryLogger(accelerator, output_dir=training.output_dir)
    prepared = accelerator, options, model, optimizer, scheduler, batches
    run = Run(*prepared, memory=memory, processor=processor, tests=tests)
    run.finite = run.finite_check(model, optimizer)
    return run


def make_loaders(batch_size: int, samples: data.Data) -> list[DataLoader[Any]]:
    # A generator of its own keeps each loader from drawing from the global one, so that resuming is exact.
    train = DataLoader(samples.train, batch_size, shuffle=True, generator=torch.Generator())
    return [train, *(DataLoader(test, batch_size, generator=torch.Generator()) for test in samples.tests.values())]


def train(run: Run) -> tuple[Run, RunCost]:
    training = run.options.training
    announce(run.model, run.options.offload, run.accelerator)
    saving = training.checkpoints_total_limit, training.resume_from_checkpoint
    # Loading safetensors would compare them with the model's own state dict, in which neuralop's metadata are.
    run.begin("neural_operator", *saving, safe_serialization=False)
    progress, num_updates = run.progress, training.epochs * len(run.batches)
    run.model.train()
    run.processor.train()
    batches = endless_batches(run.accelerator, run.batches, progress.num_updates)
    checkpointing = "" if run.options.model.checkpointed_modules else "--checkpoint_blocks --checkpoint_mlps"
    with run.updates(num_updates, checkpointing):
        while progress.num_updates < num_updates:
            with run.timed_update():
                run.epoch_loss += update(run, next(batches))
            run.memory.log(progress.num_updates)
            if progress.num_updates % len(run.batches) == 0:
                end_epoch(run, training)
            if run.save_and_stop(due=loop.is_due(progress.num_updates, training.checkpointing_steps)):
                break
    return run, run.end()


def end_epoch(run: Run, training: TrainingOptions) -> None:
    epoch = run.progress.num_updates // len(run.batches)
    figures = {"loss": run.accelerator.reduce(run.epoch_loss / len(run.batches), "mean").item()}
    run.epoch_loss.zero_()
    if epoch % training.eval_every == 0 or epoch == training.epochs:
        figures |= evaluate(run)
    loop.record(run, "epoch", epoch, figures)


def losses(run: Run) -> Iterator[Tensor]:
    """Return the losses of endless updates, for `hf-memopt compare`."""
    run.model.train()
    run.processor.train()
    return map(partial(update, run), endless_batches(run.accelerator, run.batches))


if __name__ == "__main__":
    sys.exit(one_line_errors("train_neural_operator", main))
