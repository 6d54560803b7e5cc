"""What the loops of the Accelerate recipes share: accelerator, comparison of modes, log, checkpoints."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, tqdm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_memopt import ActivationOffloader
from hf_memopt.checkpoint import Checkpoints
from hf_memopt.checkpoint.folder_lock import FolderLock, lock_of
from hf_memopt.recipes.causal_lm.model import make_offloader
from hf_memopt.recipes.common.cost import Cost, Meter
from hf_memopt.recipes.common.options import OffloadOptions, checkpoints_folder

logger = logging.getLogger(__name__)


def make_accelerator(training: Any, **settings: Any) -> Accelerator:
    """With an order of the data that can be resumed, and the tracker that the flags ask for."""
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
        log_with=None if training.report_to == "none" else training.report_to,
        project_dir=training.output_dir,
        **settings,
    )


def set_up_logging(accelerator: Accelerator) -> None:
    """Messages as they are, from the main process alone."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_memopt").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)


def lock_output(accelerator: Accelerator, folder: str) -> FolderLock:
    """Before any work: the main process takes a run's folder until the end of `main`, or until `release`.

    Raises:
        ValueError: another process writes there.
    """
    lock = lock_of(Path(folder))
    if accelerator.is_main_process:
        lock.acquire()
    return lock


@dataclass
class Progress:
    """How far training has come, and the figures on the way."""

    num_updates: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class Run:
    """What accelerate prepared, and the offloader."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: DataLoader[Any]
    offloader: ActivationOffloader | None
    mode: str
    progress: Progress = field(default_factory=Progress)

    def saving(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        return nullcontext() if self.offloader is None else self.offloader.offload_context(self.model)

    def position(self) -> dict[str, Any]:
        """What checkpoints hold beside accelerate's states."""
        return asdict(self.progress)

    def restore(self, position: dict[str, Any]) -> None:
        """Go on from there."""
        self.progress = Progress(**position)


def record(run: Run, unit: str, number: int, figures: dict[str, float]) -> None:
    """Log the figures of an update or epoch, send them to the trackers and keep them."""
    run.progress.history.append({unit: number, **figures})
    run.accelerator.log(figures, step=number)
    logger.info(f"{unit} {number:6}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def open_checkpoints(run: Run, training: Any, **settings: Any) -> Checkpoints:
    """The checkpoints of a run, after resuming from the one that the flags name."""
    checkpoints = Checkpoints(
        run.accelerator, checkpoints_folder(training), training.checkpoints_total_limit, **settings
    )
    if training.resume_from_checkpoint is not None:
        run.restore(checkpoints.resume(training.resume_from_checkpoint))
        logger.info(f"Resumed {training.resume_from_checkpoint} after {run.progress.num_updates} updates")
    return checkpoints


def save_and_stop(run: Run, checkpoints: Checkpoints, every: int) -> bool:
    """Save after every so many updates, and when told to stop; returns whether that is the case."""
    stop = checkpoints.stop_requested()
    if stop or (every and run.progress.num_updates % every == 0):
        logger.info(f"Saved {checkpoints.save(run.progress.num_updates, run.position())}")
    if stop:
        logger.warning("Stopping, as SIGTERM or SIGINT asked; go on with --resume_from_checkpoint latest")
        run.accelerator.end_training()
    return stop


def measure(run: Run, update: Callable[[], Tensor], options: OffloadOptions) -> Cost:
    """Cost of the second half of a few updates, and the losses of all."""
    run.model.train()
    meter = Meter(run.mode, run.accelerator.device, run.offloader)
    losses = []
    for step in tqdm(range(options.compare_steps), desc=f"Comparing: {run.mode}", unit="update", leave=False):
        if step == options.compare_steps // 2:
            meter.restart()
        meter.begin()
        loss = update()
        meter.end()
        losses.append(loss.item())
    cost = replace(meter.cost(), losses=losses)
    if run.offloader is None:
        cost.saved_mib = _saved_mib(run, update, options)
    run.accelerator.free_memory()
    return cost


def _saved_mib(run: Run, update: Callable[[], Tensor], options: OffloadOptions) -> float:
    """What a pass without offloading keeps for backward, counted as in the other modes."""
    keep_all = replace(options, host_budget_gib=0, cpu_copies=True)
    run.offloader = counter = make_offloader("all", keep_all, run.accelerator.device)
    update()
    return 1024 * counter.stats.measured_peak_gib
