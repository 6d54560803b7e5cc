"""The shared parts of the Accelerate recipes' loops: accelerator, offloader, run, log, checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers  # Its parts are slow to import, and are when they are named.
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, tqdm
from torch import Tensor, nn
from tqdm.contrib.logging import logging_redirect_tqdm

from hf_memopt.checkpoint import Checkpoints
from hf_memopt.disk.files_on_disk import lock_of
from hf_memopt.memory import MemoryTracker, explain_oom
from hf_memopt.memory.logger import short_figure
from hf_memopt.memory.oom import CHECKPOINTING, HALF_MICRO_BATCH, OFFLOADING
from hf_memopt.recipes.common.flags import as_settings
from hf_memopt.recipes.common.options import RunOptions, checkpoints_folder
from hf_memopt.recipes.common.results import History, RunCost, StepTimer, warn_if_nothing_offloaded
from hf_memopt.report.offloading import OffloadingRecord
from hf_memopt.training.finite_check import FiniteCheck
from hf_memopt.weights.base import streamed_weights_of
from hf_memopt.weights.optimizer import report_of

logger = logging.getLogger(__name__)


def make_accelerator(training: Any, folder: str, **settings: Any) -> Accelerator:
    """Return an Accelerator with an order of the data that can be resumed, and the flags' tracker."""
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
        log_with=None if training.report_to == "none" else training.report_to,
        project_dir=folder,
        **settings,
    )


def pins_memory() -> bool:
    """Return whether batches are to be page-locked: for an accelerator with memory of its own, which MPS has not."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def make_schedule(optimizer: Any, training: RunOptions, num_updates: int, num_processes: int) -> Any:
    """Return the flags' schedule, to be prepared by accelerate, which steps it once per process."""
    return transformers.get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.warmup_steps * num_processes,
        num_training_steps=num_updates * num_processes,
    )


@contextmanager
def writing_to(folder: str | Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the lock of a run's folder, and print the main process's log messages above progress bars."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_memopt").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    lock = lock_of(Path(folder))
    if accelerator.is_main_process:
        lock.acquire()
    with logging_redirect_tqdm():
        yield
    lock.release()


@dataclass
class Progress:
    """The progress of training and the figures on the way; goes into checkpoints."""

    num_updates: int = 0
    history: History = field(default_factory=list)


@dataclass
class Run:
    """The objects that accelerate prepared, and the offloader, which is None in mode "off"."""

    accelerator: Accelerator
    options: Any
    model: Any  # or several
    optimizer: Any  # or one of each model
    scheduler: Any = None  # likewise
    batches: Any = None  # of an epoch; None where a step is only simulated
    progress: Any = field(default_factory=Progress)
    memory: Any = field(default_factory=partial(MemoryTracker, "cpu"))  # a MemoryLogger in training
    finite: Any = None  # a FiniteCheck, or one of each model; None where a step is only simulated, as it reads values

    def __post_init__(self) -> None:
        self.offloader = self.options.offload.make_offloader(self.accelerator.device)

    def saving(self, model: Any = None) -> AbstractContextManager[Any]:
        """Return the context of a forward pass and its loss; `model` is the one that runs, if there are several."""
        model = self.model if model is None else model
        return nullcontext() if self.offloader is None else self.offloader.offload_context(model)

    def finite_check(self, model: nn.Module, optimizer: Any) -> FiniteCheck:
        return FiniteCheck(self.accelerator, model, optimizer, lambda: self.progress.num_updates + 1)

    def end_micro_batch(self, loss: Tensor) -> None:
        if self.finite is not None:
            self.finite.end_micro_batch(loss)

    def before_update(self) -> None:
        """Raise NonFiniteGradientError for a loss or gradient of the update that is not finite."""
        if self.finite is not None:
            self.finite.before_update()

    def timer(self) -> StepTimer:
        return StepTimer(self.options.offload.offload, self.accelerator.device, self.offloader)

    def begin(
        self, name: str, keep: int, resumed: str | None, *, by_section: bool = False, safe_serialization: bool = True
    ) -> None:
        """Start the trackers with this name, and go on from the checkpoint `resumed`, if there is one."""
        self.accelerator.init_trackers(name, config=as_settings(self.options, by_section=by_section))
        folder = checkpoints_folder(self.options.output_dir)
        self._checkpoints = Checkpoints(self.accelerator, folder, keep, safe_serialization=safe_serialization)
        if resumed is not None:
            self.restore(self._checkpoints.resume(resumed))
            logger.info(f"Resumed {resumed} at step {self.progress.num_updates}")
        self._timer = self.timer()

    @contextmanager
    def updates(
        self, total: int, checkpointing: str, halving: str = "--auto_micro_batch", unit: str = "update"
    ) -> Iterator[None]:
        """Enclose the updates, `total` of them: show progress, save at signals and errors, help where memory runs out.

        `checkpointing` are the flags that switch it on, empty where it is on; `halving` those that halve the
        micro-batch.
        """
        bar = tqdm(total=total, initial=self.progress.num_updates, unit=unit, desc="Training")
        with bar as self._bar, self._checkpoints.stopping_on_signal(), saving_after_errors(self, self._checkpoints):
            model = self.model if isinstance(self.model, nn.Module) else self.model[0]
            flags = remedies(self.options.offload.offload, checkpointing, halving)
            with explain_oom(model, output_dir=self.options.output_dir, flags=flags):
                yield

    @contextmanager
    def timed_update(self) -> Iterator[None]:
        """Time an update, and show it in the bar."""
        self._timer.begin()
        yield
        self._timer.end()
        advance(self, self._bar)

    def save_and_stop(self, *, due: bool, flag: str = "resume_from_checkpoint") -> bool:
        """Save where a checkpoint is due, and when told to stop; return whether that is the case."""
        stop = self._checkpoints.stop_requested()
        if stop or due:
            logger.info(f"Saved {self._checkpoints.save(self.progress.num_updates, self.position())}")
        if stop:
            logger.warning(f"Stopping, as SIGTERM or SIGINT asked; go on with --{flag} latest")
            self.accelerator.end_training()
        return stop

    def end(self) -> RunCost:
        """Return the cost of the updates; leave the offloader's work in the run's folder, and warn if there is none."""
        weights = streamed_weights_of(self.model) if isinstance(self.model, nn.Module) else None
        reports = [report_of(self.optimizer), None if weights is None else weights.report()]
        away = [str(report) for report in reports if report is not None]
        if (self.offloader is not None or away) and self.accelerator.is_main_process:
            OffloadingRecord.of(self.offloader, facts={}, weights=away).write(Path(self.options.output_dir))
        return self.cost(self._timer)

    def cost(self, timer: StepTimer) -> RunCost:
        """Return the cost of the updates, and warn if an offloader that could have moved something did not."""
        cost = timer.cost()
        warn_if_nothing_offloaded(cost, self.options.offload, self.accelerator.device.type)
        return cost

    def position(self) -> dict[str, Any]:
        return asdict(self.progress)

    def restore(self, position: dict[str, Any]) -> None:
        self.progress = type(self.progress)(**position)


def advance(run: Run, bar: Any) -> None:
    bar.set_postfix_str(short_figure(run.memory.tracker), refresh=False)
    bar.update()


def remedies(mode: str, checkpointing: str, halving: str) -> dict[str, str]:
    """Return the flags that help where memory runs out in a mode of offloading."""
    flags = {HALF_MICRO_BATCH: f"{halving}: the same update in more forward passes"}
    if mode == "off":
        flags[OFFLOADING] = "--offload auto: the same gradients, copies over the host link"
    elif mode == "auto":
        flags[OFFLOADING] = "--offload all, or a smaller --budget_gib: moves what --offload auto has kept"
    if checkpointing:
        flags[CHECKPOINTING] = f"{checkpointing}: forward is computed again; with --offload inputs its inputs move too"
    return flags


def record(run: Any, unit: str, number: int, figures: dict[str, float]) -> None:
    run.progress.history.append({unit: number, **figures})
    run.accelerator.log(figures, step=number)
    shown = [f"{name} {value:.4g}" for name, value in figures.items()]
    logger.info("  ".join([f"{unit} {number:6}", *shown, short_figure(run.memory.tracker)]))


@contextmanager
def saving_after_errors(run: Run, checkpoints: Checkpoints) -> Iterator[None]:
    """Save the trained weights when an error ends the run.

    Each update is applied whole or not at all. Those of an unfinished step are in the checkpoint, which counts the
    whole steps, so that going on begins that step anew. The other processes of a run cannot take part in saving when
    one fails; it leaves the checkpoint before.
    """
    try:
        yield
    except Exception as error:
        has_traceback = not isinstance(error, FloatingPointError)  # which says all there is
        if run.accelerator.num_processes > 1:
            logger.error("Stopped by an error on this process; resume from the last checkpoint", exc_info=has_traceback)
        elif isinstance(error, FloatingPointError) and not _has_finite_weights(run.accelerator):
            logger.error("The weights overflowed in the update before; resume from the last checkpoint")
        elif run.progress.num_updates > 0:
            saved = checkpoints.save(run.progress.num_updates, run.position())
            told = f"Stopped by an error after {run.progress.num_updates} steps; saved {saved}"
            logger.error(told, exc_info=has_traceback)
        raise


def _has_finite_weights(accelerator: Accelerator) -> bool:
    return all(weight.isfinite().all() for model in accelerator._models for weight in model.parameters())


@contextmanager
def reporting(folder: str | Path) -> Iterator[None]:
    """Turn an error inside into one warning: a report is about a model that is in `folder` already."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())
        logger.warning(f"The report is not complete ({type(error).__name__}: {words}); the model is in {folder}")
        logger.debug("while reporting", exc_info=True)


def is_due(number: int, interval: int) -> bool:
    return interval > 0 and number % interval == 0
