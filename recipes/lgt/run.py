"""Runs of `train_lgt.py`: what they hold, how they begin, and one update of their weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import batched, islice

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from hf_memopt.checkpoint import endless_batches
from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.causal_lm.model import make_offloader
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common.cost import Cost
from hf_memopt.recipes.lgt import data as data
from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.recipes.lgt.step import Batch, Objective, Outputs, build_model, build_optimizer
from hf_memopt.training import GradientCache, StepResult, train_step
from hf_memopt.training.compile import compile_module


def make_accelerator(config: Config) -> Accelerator:
    training = config.training
    precision = {"bfloat16": "bf16", "float16": "fp16"}[training.amp_dtype] if training.use_amp else "no"
    return Accelerator(
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
        step_scheduler_with_optimizer=False,  # it is stepped once per epoch
        log_with=None if training.report_to == "none" else training.report_to,
        project_dir=config.checkpoint.save_dir,
    )


@dataclass
class Progress(loop.Progress):
    """How far training has come; goes into checkpoints.

    Attributes:
        num_updates: of the weights.
        history: one entry for each complete epoch.
        epoch: how many are complete.
        num_windows: updates in the epoch that is not.
        sums: of the losses in these.
        seconds: that these took.
    """

    epoch: int = 0
    num_windows: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(kw_only=True)
class Run(loop.Run):
    """What accelerate prepared, and all that an update needs.

    Attributes:
        config: of the run.
        batches: of row numbers.
        bank: whose rows these are.
        average: of the weights, where there is one.
        memory: logs what each update takes.
        objective: the loss.
        memory_bytes: the most that was held up to the end of each epoch, since the run was started or resumed.
    """

    config: Config
    bank: data.LatentBank
    average: AveragedModel | None
    memory: MemoryLogger
    objective: Objective
    progress: Progress = field(default_factory=Progress)
    memory_bytes: list[int] = field(default_factory=list)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.saving():
            return self.objective(model, batch)

    def outputs(self, batch: Batch) -> Outputs:
        with self.saving():
            return self.objective.outputs(self.model, batch)

    def best_model(self) -> LatentTransfer:
        """The averaged weights where there are any."""
        model: LatentTransfer = (
            self.accelerator.unwrap_model(self.model) if self.average is None else self.average.module
        )
        return model


def prepare(accelerator: Accelerator, mode: str, config: Config, train_data: data.Latents) -> Run:
    """Model, optimizer, schedule and batches, the same for every call.

    Raises:
        ValueError: there are fewer latents than one batch of all processes needs.
    """
    training = config.training
    num_latents = training.batch_size * accelerator.num_processes
    if num_latents > len(train_data.styles):
        raise ValueError(
            f"training.batch_size={training.batch_size}: a batch of all processes needs {num_latents} latents, and "
            f"there are {len(train_data.styles)}; use smaller batches or more data"
        )
    set_seed(training.seed)
    model = build_model(config).to(accelerator.device)
    average = None
    if training.ema_decay is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.ema_decay))
        accelerator.register_for_checkpointing(average)
    if training.use_compile:
        compile_module(model.unet, mode=training.compile_mode, recompile_limit=training.recompile_limit)
    optimizer = build_optimizer(config, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=training.num_epochs, eta_min=training.min_learning_rate
    )
    rows = range(len(train_data.styles))
    loader = DataLoader(rows, training.batch_size, shuffle=True, drop_last=True, generator=torch.Generator())
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, loader)
    return Run(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        offloader=make_offloader(mode, config.offload, accelerator.device),
        mode=mode,
        config=config,
        bank=data.LatentBank(train_data, config, accelerator.device),
        average=average,
        memory=MemoryLogger(accelerator, log_every=training.log_every, output_dir=config.checkpoint.save_dir),
        objective=Objective(config),
    )


def update(run: Run, window: list[Tensor]) -> dict[str, float]:
    """One update of the weights on a window of batches, given as row numbers; returns the means of its losses."""
    progress, training = run.progress, run.config.training
    micro_batches = run.bank.micro_batches(window, progress.num_updates, epsilon(run.config, progress.epoch))
    with run.memory.phase("step"):
        result = (exact_step if training.gradient_cache else accumulating_step)(run, micro_batches)
    if run.average is not None and not result.skipped:
        run.average.update_parameters(run.accelerator.unwrap_model(run.model))
    progress.num_updates += 1
    run.memory.log(progress.num_updates)
    means = run.accelerator.reduce(run.objective.take_means(), "mean")
    return {name: value.item() for name, value in means.items()} | {"grad_norm": result.grad_norm}


def accumulating_step(run: Run, micro_batches: list[Batch]) -> StepResult:
    """The mean of the micro-batches' gradients."""
    norm = run.config.training.max_grad_norm
    return train_step(run.accelerator, run.model, run.loss, micro_batches, run.optimizer, max_grad_norm=norm)


def exact_step(run: Run, micro_batches: list[Batch]) -> StepResult:
    """The gradient of all micro-batches as one batch, of all processes."""
    cache = GradientCache(run.accelerator, run.outputs, run.objective.loss, models=[run.model])
    norm = run.config.training.max_grad_norm
    return cache.step(micro_batches, run.optimizer, max_grad_norm=norm)


def epsilon(config: Config, epoch: int) -> float:
    """The earliest time that integration starts at, rising over the first epochs."""
    warmup = config.training.epsilon_warmup_epochs
    return config.training.epsilon * (1.0 if epoch >= warmup else epoch / warmup)


def window_sizes(run: Run) -> list[int]:
    """How many batches each update of an epoch has; the last one may have fewer."""
    return [len(window) for window in batched(range(len(run.batches)), run.config.training.accumulation_steps)]


def measure(mode: str, config: Config, train_data: data.Latents) -> Cost:
    """A short run of its own in one mode: the same weights and batches each time, the second half measured."""
    run = prepare(make_accelerator(config), mode, config, train_data)
    windows = endless_windows(run)
    return loop.measure(run, lambda: torch.tensor(update(run, next(windows))["loss"]), config.offload)


def endless_windows(run: Run) -> Iterator[list[Tensor]]:
    batches = endless_batches(run.accelerator, run.batches)
    while True:
        for size in window_sizes(run):
            yield list(islice(batches, size))
