"""The home of optimizers' state, on the host or in a file, for trainers and for loops on Accelerate."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.callbacks.memory_logging import MemoryLoggingCallback
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights
from hf_memopt.weights.homes.home import HOMES, Home
from hf_memopt.weights.optimizer import OptimizerReport

logger = logging.getLogger(__name__)


class HomeOfOptimizers(TrainerCallback):
    """Gives the state of optimizers a home between updates, and logs the costs when a trainer's training ends.

    Args:
        weights: those that stream while they train, whose updates visit them. None leaves weights where they are.
    """

    def __init__(self, home: Home, disk: str | os.PathLike[str] | None, weights: StreamedWeights | None = None) -> None:
        if home not in HOMES:
            raise ValueError(f"optimizer_home={home!r} is unknown; use one of {', '.join(HOMES)}")
        check_disk(disk)
        self._home: Home = home
        self._disk, self._weights = disk, weights
        self._reports: dict[object, OptimizerReport] = {}  # they outlive their optimizers
        self.unreached = (  # until one of them has made an update, then empty
            f"optimizer_home={home} reaches no optimizer that is stepped; give it to Accelerator.prepare, or make it "
            f"OffloadedOptimizer(optimizer, home={home!r}) in the script"
        )

    def take(self, optimizer: Any) -> Any:
        """Return an optimizer that keeps its state here."""
        if isinstance(optimizer, AcceleratedOptimizer) and isinstance(optimizer.optimizer, OffloadedOptimizer):
            return optimizer
        if not isinstance(optimizer, OffloadedOptimizer):
            try:
                optimizer = OffloadedOptimizer(optimizer, self._home, disk=self._disk)
            except ValueError as error:
                option = f"optimizer_home={self._home!r}" if self._weights is None else "trained=True"
                raise ValueError(f"{option}: {error}") from error
        if self._weights is not None:
            self._weights.adopt(optimizer)
        key = object()

        def note(stepped: Any, *others: Any) -> None:
            self._reports[key], self.unreached = stepped.report(), ""

        optimizer.register_step_post_hook(note)
        return optimizer

    def take_from(self, trainer: Trainer) -> Callable[[], None]:
        """Take the optimizer that a trainer makes, or was given, when training begins; return how to undo that."""
        if any(isinstance(callback, HomeOfOptimizers) for callback in trainer.callback_handler.callbacks):
            raise ValueError(
                f"optimizer_home={self._home!r}: the trainer's optimizer has one already; remove() the earlier handle"
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.refuse("DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP")
        plain = trainer.create_optimizer
        backward = trainer.accelerator.backward

        def create_optimizer(*args: Any, **kwargs: Any) -> Any:
            plain(*args, **kwargs)
            trainer.optimizer = self.take(trainer.optimizer)
            return trainer.optimizer

        def backward_with_update(*args: Any, **kwargs: Any) -> None:
            with self._update_in_backward(trainer):
                backward(*args, **kwargs)

        def undo() -> None:
            del trainer.create_optimizer
            if self._weights is not None:
                trainer.accelerator.backward = backward
            trainer.remove_callback(self)

        trainer.create_optimizer = create_optimizer
        if self._weights is not None:
            trainer.accelerator.backward = backward_with_update
        trainer.add_callback(self)
        return undo

    def _update_in_backward(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context of a backward pass: that of the update, where nothing looks at gradients in between."""
        accelerator, optimizer = trainer.accelerator, getattr(trainer.optimizer, "optimizer", None)
        may_be_seen = (
            trainer.args.max_grad_norm
            or accelerator.scaler is not None
            or type(trainer).training_step is not Trainer.training_step
            or any(
                type(each).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
                for each in trainer.callback_handler.callbacks
                if not isinstance(each, MemoryLoggingCallback)
            )
        )
        if may_be_seen or not accelerator.sync_gradients or not isinstance(optimizer, OffloadedOptimizer):
            return nullcontext()
        return optimizer.update_in_backward()

    def refuse(self, engine: str) -> None:
        raise ValueError(
            f"optimizer_home={self._home!r}: {engine} places the optimizer's state already; leave optimizer_home out, "
            f"and use {engine}'s own offload"
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.log()

    def log(self) -> None:
        """Log the costs of the optimizers that have made updates since the last call."""
        for report in self._reports.values():
            if report.state_bytes or report.resident_bytes:
                logger.info("%s", report)
            else:
                logger.warning("optimizer_home=%r moves nothing: the optimizer keeps no state", self._home)
        self._reports.clear()
