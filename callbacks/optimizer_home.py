"""Optimizers of trainers and of loops on Accelerate, whose state has a home on the host or in a file."""

import logging
import os
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.weights import OffloadedOptimizer
from hf_memopt.weights.optimizer import OPTIMIZER_HOMES, OptimizerHome, OptimizerReport

logger = logging.getLogger(__name__)


class OptimizerHomes:
    """Gives optimizers a home for their state, and holds their reports, which outlive them.

    Attributes:
        reports: of each optimizer, after its newest update.
    """

    def __init__(self, home: OptimizerHome, disk: str | os.PathLike[str] | None) -> None:
        if home not in OPTIMIZER_HOMES:
            raise ValueError(f"optimizer_home={home!r} is unknown; use one of {', '.join(OPTIMIZER_HOMES)}")
        check_disk(disk)
        self._home: OptimizerHome = home
        self._disk = disk
        self.reports: dict[int, OptimizerReport] = {}
        self._num_given = 0

    def give(self, optimizer: Any) -> Any:
        """Return an optimizer with a home; unchanged if accelerate has prepared it before."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        if not isinstance(optimizer, OffloadedOptimizer):
            try:
                optimizer = OffloadedOptimizer(optimizer, self._home, disk=self._disk)
            except ValueError as error:
                raise ValueError(f"optimizer_home={self._home!r}: {error}") from error
        number, self._num_given = self._num_given, self._num_given + 1

        def note(stepped: Any, *others: Any) -> None:
            self.reports[number] = stepped.report()

        optimizer.register_step_post_hook(note)
        return optimizer

    def log(self) -> None:
        for report in self.reports.values():
            if report.state_bytes or report.resident_bytes:
                logger.info("%s", report)
            else:
                logger.warning("optimizer_home=%r moves nothing: the optimizer keeps no state", self._home)

    def refuse_engine(self, engine: str) -> None:
        raise ValueError(
            f"optimizer_home={self._home!r}: {engine} places the optimizer's state already; leave optimizer_home out, "
            f"and use {engine}'s own offload"
        )


class OptimizerAway(TrainerCallback):
    """Gives the state of the optimizer that a trainer makes, or was given, a home from `train()` on."""

    def __init__(self, trainer: Trainer, home: OptimizerHome, disk: str | os.PathLike[str] | None) -> None:
        self.homes = OptimizerHomes(home, disk)
        if any(isinstance(callback, OptimizerAway) for callback in trainer.callback_handler.callbacks):
            raise ValueError(
                f"optimizer_home={home!r}: the trainer's optimizer has one already; remove() the earlier handle first"
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.homes.refuse_engine("DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP")
        prepared = trainer.optimizer
        if isinstance(prepared, AcceleratedOptimizer) and not isinstance(prepared.optimizer, OffloadedOptimizer):
            raise ValueError(
                f"optimizer_home={home!r}: the trainer has prepared its optimizer already; attach before the first "
                "train(), or give it optimizers=(OffloadedOptimizer(optimizer), None)"
            )
        self._trainer, self._plain = trainer, trainer.create_optimizer
        trainer.create_optimizer = self._create
        trainer.add_callback(self)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.homes.log()

    def remove(self) -> None:
        """Leave the next optimizer without a home; one that is there keeps it."""
        del self._trainer.create_optimizer
        self._trainer.remove_callback(self)

    def _create(self, *args: Any, **kwargs: Any) -> Any:
        self._plain(*args, **kwargs)
        self._trainer.optimizer = self.homes.give(self._trainer.optimizer)
        return self._trainer.optimizer
