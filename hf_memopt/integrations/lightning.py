"""Activation offloading and memory figures as callbacks of Lightning's Trainer."""

import functools
import logging
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.callbacks.offloading import is_wrapped, log_what_was_done, make_offloader
from hf_memopt.memory import MemoryTracker, explain_oom
from hf_memopt.memory.logger import check_warn_at, high_memory_message, largest_of_ranks, memory_metrics

logger = logging.getLogger(__name__)


class ActivationOffloading(Callback):
    """Offloads tensors that training steps save for backward; gradients are bitwise those without it.

    Each `training_step` runs in an `offload_context`: the forward pass and the loss. Validation, test and prediction
    are left alone. With manual optimization the step's own backwards run inside the context too.

    While `fit` runs, `training_step` of the trainer's strategy is replaced, the one place that encloses forward and
    loss and not backward; when it ends, also by an exception, the strategy is as it was. Checkpoints hold nothing of
    it: a run that is resumed measures and plans anew.

    Args:
        offloader: an `ActivationOffloader` or one of its modes. None, one made of `options`.
        options: options of `ActivationOffloader`, unless one is given.

    Raises:
        ValueError: `offloader` is neither; when `fit` begins, if another offloader is at work, since two do not stack.

    Example:
        >>> trainer = Trainer(callbacks=[ActivationOffloading(budget_gib=4.0), MemoryMonitor()])
    """

    def __init__(self, offloader: ActivationOffloader | str | None = None, **options: Any) -> None:
        self.offloader = make_offloader(offloader, **options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if "training_step" in vars(strategy) or is_wrapped(pl_module):
            raise ValueError(
                "another ActivationOffloader is at work in this trainer, and two do not stack; register one callback, "
                "and remove() the handle of offloader.wrap(model)"
            )
        strategy.training_step = functools.partial(self._training_step, strategy.training_step, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            log_what_was_done(self.offloader.stats)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore(trainer)

    def _training_step(self, plain: Any, pl_module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        with self.offloader.offload_context(pl_module):
            return plain(*args, **kwargs)

    def _restore(self, trainer: Trainer) -> None:
        replaced = vars(trainer.strategy).get("training_step")
        if isinstance(replaced, functools.partial) and replaced.func == self._training_step:
            del trainer.strategy.training_step


class MemoryMonitor(Callback):
    """Logs peak memory with the loss, warns when it gets close to the limit, and explains a lack of memory.

    Whenever the trainer logs (`log_every_n_steps`), its loggers and `trainer.logged_metrics` get the figures of
    `hf_memopt.memory.logger.memory_metrics`, the largest over all ranks. The phases are `forward` (with the loss),
    `backward`, `optimizer` and `evaluation`. A `torch.OutOfMemoryError` gets the report of `explain_oom` as a note, and
    as a file in `default_root_dir`. Nothing waits for the device, and training is bitwise the same.

    Args:
        warn_at: warn, once, when the peak reaches this share of the device memory that the process can have.

    Raises:
        ValueError: `warn_at` is no share.
    """

    def __init__(self, *, warn_at: float = 0.85) -> None:
        check_warn_at(warn_at)
        self._warn_at: float | None = warn_at
        self._tracker: MemoryTracker | None = None

    @property
    def tracker(self) -> MemoryTracker:
        """Return the tracker, from the beginning of `fit` on."""
        assert self._tracker is not None, "fit has not begun"
        return self._tracker

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tracker = MemoryTracker(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.tracker.switch_to("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.tracker.switch_to("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tracker.switch_to(None)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.tracker.switch_to("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tracker.step()
        if not trainer._logger_connector.should_update_logs:  # as Lightning's own monitors ask
            return
        reading = self.tracker.read()
        figures = largest_of_ranks(memory_metrics(self.tracker, reading))
        pl_module.log_dict(figures, on_step=True, on_epoch=False)
        if self._warn_at is not None and (message := high_memory_message(self.tracker, reading, self._warn_at)):
            logger.warning("%s", message)
            self._warn_at = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.tracker.switch_to("evaluation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.tracker.switch_to(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Raised again here, its note reaches the caller with the very object that goes on.
        with suppress(torch.OutOfMemoryError), explain_oom(pl_module, output_dir=trainer.default_root_dir):
            if isinstance(exception, torch.OutOfMemoryError):
                raise exception
