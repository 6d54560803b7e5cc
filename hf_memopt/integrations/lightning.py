"""Activation offloading as a callback of Lightning's Trainer."""

import functools
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.wrapped_module import wrapped_module
from hf_memopt.callbacks.offloading import log_what_was_done, make_offloader

__all__ = ["ActivationOffloading"]


class ActivationOffloading(Callback):
    """Offloads tensors that training steps save for backward; gradients are bitwise those without it.

    Each `training_step` runs in an `offload_context`, with manual optimization its own backwards too. `training_step`
    of the trainer's strategy is replaced for it, the one place that encloses forward and loss and not backward, until
    `fit` ends, also by an exception. Checkpoints hold nothing of it: a run that is resumed measures and plans anew.

    Args:
        offloader: an `ActivationOffloader` or one of its modes. None, one made of `options`.
        options: options of `ActivationOffloader`, unless one is given.

    Raises:
        ValueError: `offloader` is neither; when `fit` begins, if another offloader is at work, since two do not stack.

    Example:
        >>> trainer = Trainer(callbacks=[ActivationOffloading(budget_gib=4.0)])
    """

    def __init__(self, offloader: ActivationOffloader | str | None = None, **options: Any) -> None:
        self.offloader = make_offloader(offloader, **options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if "training_step" in vars(strategy) or wrapped_module(pl_module) is not None:
            raise ValueError(
                "another ActivationOffloader is at work in this trainer, and two do not stack; register one callback, "
                "and remove() the handle of offloader.wrap(model)"
            )
        strategy.training_step = functools.partial(self._training_step, strategy.training_step, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            log_what_was_done(self.offloader)

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
