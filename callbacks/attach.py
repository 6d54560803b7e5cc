"""Everything that this library does for a Trainer, attached in one line."""

import inspect
import os
from contextlib import ExitStack
from functools import partial

from transformers import Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.callbacks.fit import Fit
from hf_memopt.callbacks.frozen_models import FrozenModels
from hf_memopt.callbacks.homes import HomeOfOptimizers, StreamedBase, streams_alone
from hf_memopt.callbacks.memory_logging import LeakDetectionCallback, MemoryPageCallback, RunReports
from hf_memopt.callbacks.offloading import OffloadedLoss, make_offloader
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.weights import StreamedWeights
from hf_memopt.weights.base import BaseHome
from hf_memopt.weights.homes.home import Home
from hf_memopt.weights.optimizer import report_of
from hf_memopt.weights.strategies.auto import TeacherMode


def attach(
    trainer: Trainer,
    *,
    offloader: ActivationOffloader | str | None = "auto",
    base: BaseHome | StreamedWeights | None = None,
    trained: bool = False,
    frozen: TeacherMode | None = None,
    frozen_home: Home = "host",
    optimizer_home: Home | None = None,
    optimizer_disk: str | os.PathLike[str] | None = None,
    optimizer_budget_gib: float | None = None,
    selective_checkpointing: bool = False,
    memory: bool = True,
    leak_check: bool = False,
    memory_report: bool = False,
    fit: bool = False,
) -> "Attachment":
    """Switch on parts of this library for a transformers Trainer or a descendant, such as TRL's trainers.

    Call it before `trainer.train()`. It stays active for later `train()` calls, even after an exception.

    Args:
        trainer: its training steps are affected, and with a streamed base its evaluation.
        offloader: an `ActivationOffloader` or one of its modes, for tensors that forward passes and losses save for
            backward. None, no offloading.
        base: the `StreamedWeights` of the trainer's model, or the home of its frozen weights, from which they then
            stream. The trainer has moved a model that does not stream yet to its device: where it does not fit, make
            the `StreamedWeights` before the trainer. Those of a model that streams already work with None as well.
        trained: with a `base`, the weights that train stream, too; their gradients and the optimizer's state have their
            home there as well, unless `optimizer_home` names another one.
        frozen: mode of `OffloadedTeacher` by which TRL's reference model, teacher and reward models live between their
            calls. None leaves them as they are.
        frozen_home: where they live between calls: `"host"`, in host memory; `"file"`, in the safetensors files of the
            folder from which they were loaded, or in files without a name that are written once (see
            `OffloadedTeacher`).
        optimizer_home: where the state of the optimizer that the trainer makes, or was given, lives between updates
            (`OffloadedOptimizer`): `"host"` or `"file"`. None leaves it on the device.
        optimizer_disk: folder on a local disk for that file. None: the system's for temporary files.
        optimizer_budget_gib: device memory for state that stays there. None: none stays.
        selective_checkpointing: checkpoint the model's blocks, but for their expensive operations
            (`apply_selective_checkpointing`), instead of the trainer's gradient checkpointing.
        memory: log peak memory with the loss (`MemoryLoggingCallback`, unless the trainer has one), add it to the
            trainer's model cards and, for `hf-memopt report`, to `offloading.json`, and explain a lack of memory in the
            output folder and in the error (`explain_oom`).
        leak_check: warn, once, when memory stays behind at every step (`LeakDetectionCallback`).
        fit: decide which parts leave the device, so that training fits in the memory that there is, and change that
            while it runs; all arguments above keep their defaults. The trainer has moved its model to the device: where
            that does not fit, start the script with `hf-memopt fit`.
        memory_report: when training ends, write `report/report.html` and `trainer_state.json` into the output folder.

    Returns:
        A handle whose `remove()` restores the trainer, and the weights that `base` has stream. An optimizer that has
        been made keeps its home.

    Raises:
        ValueError: activations are offloaded already, naming the option to switch off; the trainer has an attached
            offloader; its model has no frozen weights, or others than `base` says stream; it has no frozen model that
            could live elsewhere; its optimizer cannot, or is FSDP's or DeepSpeed's; `selective_checkpointing` beside
            gradient checkpointing or `model_init`; `memory_report` lacks matplotlib; or `fit` comes with another
            argument, or in one of several processes.

    Example:
        >>> handle = hf_memopt.attach(trainer, offloader=ActivationOffloader(budget_gib=4.0))
        >>> trainer.train()
    """
    given = {name: value for name, value in locals().items() if name != "trainer"}
    NOT_NEGATIVE.check("optimizer_budget_gib", optimizer_budget_gib)
    if fit:
        defaults = {each.name: each.default for each in inspect.signature(attach).parameters.values()} | {"fit": True}
        name = next((name for name, value in given.items() if value != defaults[name]), None)
        if name is not None:
            raise ValueError(f"fit=True decides {name} by itself, and {name}={given[name]!r}; leave it out")
        return attach_fit(trainer, Fit())
    chosen = None if offloader is None else make_offloader(offloader)
    with ExitStack() as undo:
        if selective_checkpointing:
            if trainer.model_init is not None:
                raise ValueError(
                    "selective_checkpointing=True: model_init makes the model anew at each train(); give the trainer a "
                    "model"
                )
            undo.callback(apply_selective_checkpointing(trainer.model).remove)
        weights: StreamedWeights | None = None
        if base is not None or streams_alone(trainer):
            streamed = StreamedBase(trainer, base, trained)
            undo.callback(streamed.remove)
            weights = streamed.weights if streamed.weights.trained else None
        elif trained:
            raise ValueError("trained=True needs base, the home of the weights: 'host' or 'file'")
        if chosen is not None:
            undo.callback(OffloadedLoss(trainer, chosen).remove)
        if frozen is not None:
            undo.callback(FrozenModels(trainer, frozen, frozen_home).remove)
        home = weights.home if weights is not None and optimizer_home is None else optimizer_home
        if home is not None:
            undo.callback(HomeOfOptimizers(home, optimizer_disk, weights, optimizer_budget_gib).take_from(trainer))
        if memory:
            lines = partial(lines_about_weights, trainer)
            undo.callback(RunReports(trainer, chosen, lines).remove)
        for kind, is_on in ((LeakDetectionCallback, leak_check), (MemoryPageCallback, memory_report)):
            if is_on:
                callback = kind()
                trainer.add_callback(callback)
                undo.callback(trainer.remove_callback, callback)
        return Attachment(undo.pop_all())


class Attachment:
    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Restore the trainer. A second call does nothing."""
        self._undo.close()


def attach_fit(trainer: Trainer, fit: Fit) -> Attachment:
    """Attach the decisions of a `Fit` to a trainer."""
    fit.attach(trainer)
    undo = ExitStack()
    undo.callback(fit.remove)
    return Attachment(undo)


def lines_about_weights(trainer: Trainer) -> list[str]:
    """Return a line for each frozen model, and for the optimizer's state, that lives elsewhere."""
    callbacks = trainer.callback_handler.callbacks
    lines = [str(each.weights.report()) for each in callbacks if isinstance(each, StreamedBase)]
    lines += [line for each in callbacks if isinstance(each, FrozenModels) for line in each.lines()]
    report = report_of(trainer.optimizer)
    return lines if report is None else [*lines, str(report)]
