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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed, tqdm
from hf_memopt.recipes import neural_operator_data as data
from hf_memopt.recipes import neural_operator_report as report
from hf_memopt.recipes.causal_lm_model import make_offloader
from hf_memopt.recipes.causal_lm_options import OffloadOptions, resumed_folder
from hf_memopt.recipes.causal_lm_report import Cost, Meter, announce, explain_idleness
from hf_memopt.recipes.neural_operator_evaluation import LOSSES, evaluate
from hf_memopt.recipes.neural_operator_model import make_model, save_model
from hf_memopt.recipes.neural_operator_options import Options, parse
from neuralop.training import AdamW
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import get_scheduler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_memopt import ActivationOffloader

logger = logging.getLogger("hf_memopt.recipes.train_neural_operator")

Batch = dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what is written to `results.json`."""
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_memopt").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    with accelerator.main_process_first():  # the others find the files
        samples = data.load(options.data, accelerator.device)
    logger.info(
        f"Data: Darcy flow, {data.describe(options.data)}; {len(samples.train):,} samples at "
        f"{options.data.resolution}, tested at {', '.join(map(str, samples.tests))}"
    )
    with logging_redirect_tqdm():
        costs = [measure(mode, options, samples) for mode in options.offload.compared_modes]
        if options.training.loop == "neuralop":
            from hf_memopt.recipes.neural_operator_trainer import train_with_trainer

            loaders = make_loaders(options.training.batch_size, samples)
            model, history, cost = train_with_trainer(options, samples, loaders, accelerator)
        else:
            run = prepare(accelerator, options.offload.offload, options, samples)
            cost = train(run, options)
            model, history = accelerator.unwrap_model(run.model), run.progress.history
    results = report.results(options, accelerator, model, history, cost, costs)
    explain_idleness(results, options.offload)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(options.training.output_dir).mkdir(parents=True, exist_ok=True)
        save_model(model, options.training.output_dir)
        report.write(results, model, samples, Path(options.training.output_dir))
    accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    training = options.training
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
        log_with=None if training.report_to == "none" else training.report_to,
        project_dir=training.output_dir,
    )
    accelerator.register_save_state_pre_hook(drop_metadata)
    return accelerator


def drop_metadata(models: list[nn.Module], states: list[dict[str, Any]], folder: str) -> None:
    """neuralop puts the arguments that made a model into its state dict, and torch loads nothing but tensors safely."""
    for state in states:
        state.pop("_metadata", None)


@dataclass
class Progress:
    """How far training has come; goes into checkpoints."""

    num_epochs: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_epochs, self.history = state["num_epochs"], state["history"]


@dataclass
class Run:
    """What accelerate prepared, the data processor and the offloader."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: DataLoader[Any]
    tests: dict[int, DataLoader[Any]]
    processor: Any
    offloader: ActivationOffloader | None
    mode: str
    train_loss: str
    micro_batch_size: int
    progress: Progress = field(default_factory=Progress)

    def saving(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        return nullcontext() if self.offloader is None else self.offloader.offload_context(self.model)


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
    run = Run(
        accelerator,
        model,
        optimizer,
        scheduler,
        batches,
        dict(zip(samples.tests, tests, strict=True)),
        samples.processor.to(accelerator.device),
        make_offloader(mode, options.offload, accelerator.device),
        mode,
        training.train_loss,
        training.micro_batch_size or training.batch_size,
    )
    accelerator.register_for_checkpointing(run.progress)
    return run


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
    return torch.stack(losses).sum()


def train(run: Run, options: Options) -> Cost:
    """The training loop: epochs of updates, evaluations, checkpoints. Returns what an update cost."""
    training, progress = options.training, run.progress
    announce(run.mode, report.num_parameters(run.model), options, run.accelerator)
    run.accelerator.init_trackers("neural_operator", config=options.settings)
    resumed = resumed_folder(training)
    if resumed is not None:
        run.accelerator.load_state(resumed)
        logger.info(f"Resumed {resumed} after {progress.num_epochs} epochs")
    run.model.train()
    run.processor.train()
    meter = Meter(run.mode, run.accelerator.device, run.offloader)
    num_updates, num_done = (count * len(run.batches) for count in (training.epochs, progress.num_epochs))
    with tqdm(total=num_updates, initial=num_done, unit="update", desc="Training") as bar:
        while progress.num_epochs < training.epochs:
            losses = []
            for batch in one_epoch(run, progress.num_epochs):
                meter.begin()
                losses.append(update(run, batch))
                meter.end()
                bar.update()
            progress.num_epochs += 1
            figures = {"loss": run.accelerator.reduce(torch.stack(losses).mean(), "mean").item()}
            if progress.num_epochs % training.eval_every == 0 or progress.num_epochs == training.epochs:
                figures |= evaluate(run.model, run.processor, run.tests, run.accelerator)
            record(run, figures)
            if training.save_every and progress.num_epochs % training.save_every == 0:
                save_checkpoint(run, Path(training.output_dir))
    return meter.cost()


def one_epoch(run: Run, number: int) -> Iterator[Batch]:
    """Training batches, shuffled anew for each epoch."""
    run.batches.set_epoch(number)
    yield from run.batches


def record(run: Run, figures: dict[str, float]) -> None:
    """Log figures, send them to the trackers and keep them."""
    epoch = run.progress.num_epochs
    run.progress.history.append({"epoch": epoch, **figures})
    run.accelerator.log(figures, step=epoch)
    logger.info(f"epoch {epoch:5}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def save_checkpoint(run: Run, output: Path) -> None:
    """Everything that resuming needs, under its final name only once it is complete."""
    folder = output / f"{PREFIX_CHECKPOINT_DIR}-{run.progress.num_epochs}"
    draft = folder.with_name(f"{folder.name}.partial")
    # Loading safetensors would compare them with the model's own state dict, in which neuralop's metadata are.
    run.accelerator.save_state(str(draft), safe_serialization=False)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        draft.rename(folder)
    logger.info(f"Saved {folder}")


def measure(mode: str, options: Options, samples: data.Data) -> Cost:
    """A short run of its own in one mode: the same weights and batches each time, the second half measured."""
    num_updates = options.offload.compare_steps
    run = prepare(make_accelerator(options), mode, options, samples)
    run.model.train()
    run.processor.train()
    meter = Meter(mode, run.accelerator.device, run.offloader)
    batches = endless(run)
    losses = []
    for step in tqdm(range(num_updates), desc=f"Comparing: {mode}", unit="update", leave=False):
        if step == num_updates // 2:
            meter.restart()
        meter.begin()
        loss = update(run, next(batches))
        meter.end()
        losses.append(loss.item())
    cost = replace(meter.cost(), losses=losses)
    if run.offloader is None:
        cost.saved_mib = saved_mib(run, next(batches), options.offload)
    run.accelerator.free_memory()
    return cost


def endless(run: Run) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from one_epoch(run, epoch)
        epoch += 1


def saved_mib(run: Run, batch: Batch, options: OffloadOptions) -> float:
    """What a pass without offloading keeps for backward, counted as in the other modes."""
    keep_all = replace(options, host_budget_gib=0, cpu_copies=True)
    run.offloader = make_offloader("all", keep_all, run.accelerator.device)
    update(run, batch)
    return 1024 * run.offloader.stats.measured_peak_gib


if __name__ == "__main__":
    main()
