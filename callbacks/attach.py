"""Everything that this library does for a Trainer, attached in one line."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.autograd_state import in_backward
from hf_memopt.callbacks.homes import HomeOfOptimizers, StreamedBase, enclose, enclose_calls_of, streams_alone
from hf_memopt.callbacks.memory_logging import LeakDetectionCallback, MemoryPageCallback, RunReports
from hf_memopt.callbacks.offloading import (
    ActivationOffloadCallback,
    log_what_was_done,
    make_offloader,
    refuse_what_conflicts,
)
from hf_memopt.weights import OffloadedTeacher, StreamedWeights, VisitsByCall
from hf_memopt.weights.base import BaseHome
from hf_memopt.weights.homes.home import Home
from hf_memopt.weights.homes.weight_files import loaded_from
from hf_memopt.weights.optimizer import report_of
from hf_memopt.weights.strategies.auto import TeacherMode

logger = logging.getLogger(__name__)


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
    selective_checkpointing: bool = False,
    memory: bool = True,
    leak_check: bool = False,
    memory_report: bool = False,
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
        selective_checkpointing: checkpoint the model's blocks, but for their expensive operations
            (`apply_selective_checkpointing`), instead of the trainer's gradient checkpointing.
        memory: log peak memory with the loss (`MemoryLoggingCallback`, unless the trainer has one), add it to the
            trainer's model cards and, for `hf-memopt report`, to `offloading.json`, and explain a lack of memory in the
            output folder and in the error (`explain_oom`).
        leak_check: warn, once, when memory stays behind at every step (`LeakDetectionCallback`).
        memory_report: when training ends, write `report/report.html` and `trainer_state.json` into the output folder.

    Returns:
        A handle whose `remove()` restores the trainer, and the weights that `base` has stream. An optimizer that has
        been made keeps its home.

    Raises:
        ValueError: activations are offloaded already, naming the option to switch off; the trainer has an attached
            offloader; its model has no frozen weights, or others than `base` says stream; it has no frozen model that
            could live elsewhere; its optimizer cannot, or is FSDP's or DeepSpeed's; `selective_checkpointing` beside
            gradient checkpointing or `model_init`; or `memory_report` lacks matplotlib.

    Example:
        >>> handle = hf_memopt.attach(trainer, offloader=ActivationOffloader(budget_gib=4.0))
        >>> trainer.train()
    """
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
            undo.callback(HomeOfOptimizers(home, optimizer_disk, weights).take_from(trainer))
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


class OffloadedLoss(TrainerCallback):
    """Runs a trainer's forward pass and loss, where gradients are recorded, in an `offload_context`.

    Losses of sentence-transformers that cache gradients run the model again in backward: those calls get a context too.

    Hooks entered in `on_step_begin` would outlive an exception and pack tensors that checkpointed layers recompute.
    """

    def __init__(self, trainer: Trainer, offloader: ActivationOffloader) -> None:
        if any(isinstance(callback, OffloadedLoss) for callback in trainer.callback_handler.callbacks):
            raise ValueError("the trainer has an attached offloader already; remove() the earlier handle first")
        _refuse_callback(trainer)
        refuse_what_conflicts(offloader, trainer.args, trainer.model)
        self.offloader = offloader
        self._trainer = trainer
        self._undo = enclose(trainer, self._context)
        self._undo_calls: Callable[[], None] = lambda: None
        trainer.add_callback(self)

    def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        # Either may have changed after attaching.
        _refuse_callback(self._trainer)
        refuse_what_conflicts(self.offloader, args, self._trainer.model)
        self._undo_calls()
        if _caches_gradients(self._trainer):  # hooks on other models would only split compiled graphs
            self._undo_calls = enclose_calls_of(self._trainer.model, self._context_in_backward)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            log_what_was_done(self.offloader)

    def remove(self) -> None:
        self._undo()
        self._undo_calls()
        self._trainer.remove_callback(self)

    def _context_in_backward(self, call: str) -> AbstractContextManager[Any]:
        return self._context() if in_backward() else nullcontext()

    def _context(self) -> AbstractContextManager[Any]:
        if not torch.is_grad_enabled():  # evaluation
            return nullcontext()
        # FSDP and model_init replace the model after attaching.
        return self.offloader.offload_context(self._trainer.model)


class FrozenModels(TrainerCallback):
    """Holds TRL's `ref_model`, `teacher_model` and `reward_funcs` off the device; each call is a visit.

    Weights that are frozen in the learning model too, under the same name and with the same bits, are held once.

    Args:
        is_made: whether the trainer has these models by now; otherwise they are taken when training begins. TRL sets
            them, and moves them to the device, after `Trainer.__init__`.
    """

    def __init__(self, trainer: Trainer, mode: TeacherMode, home: Home = "host", *, is_made: bool = True) -> None:
        self._trainer, self._home = trainer, home
        self.mode: TeacherMode = mode
        self.visits: dict[str, VisitsByCall] = {}
        if is_made:
            self._take()
        trainer.add_callback(self)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.visits:
            self._take()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            for line in self.lines():
                logger.info("%s", line)

    def lines(self) -> list[str]:
        return [f"{name} as {visits.teacher.report()}" for name, visits in self.visits.items()]

    def _take(self) -> None:
        modules = _frozen_modules(self._trainer, self.mode)
        _refuse_what_moves_them(self._trainer, self.mode, modules)
        for name, module in modules.items():
            teacher = OffloadedTeacher(
                module,
                device=self._trainer.args.device,
                mode=self.mode,
                share_with=self._trainer.model,
                home=self._home,
                files=loaded_from(module) if self._home == "file" else None,
            )
            self.visits[name] = VisitsByCall(teacher)
        taken = ", ".join(f"{name} ({visits.teacher.report().mode})" for name, visits in self.visits.items())
        logger.info("frozen=%r: %s%s", self.mode, taken, _about_no_reference(self._trainer))

    def remove(self) -> None:
        for visits in self.visits.values():
            visits.remove()
            visits.teacher.module.to(self._trainer.args.device)
        self._trainer.remove_callback(self)


def lines_about_weights(trainer: Trainer) -> list[str]:
    """Return a line for each frozen model, and for the optimizer's state, that lives elsewhere."""
    callbacks = trainer.callback_handler.callbacks
    lines = [str(each.weights.report()) for each in callbacks if isinstance(each, StreamedBase)]
    lines += [line for each in callbacks if isinstance(each, FrozenModels) for line in each.lines()]
    report = report_of(trainer.optimizer)
    return lines if report is None else [*lines, str(report)]


def _caches_gradients(trainer: Any) -> bool:
    loss = getattr(trainer, "loss", None)
    losses = loss.values() if isinstance(loss, dict) else [loss]
    modules = (module for each in losses if isinstance(each, nn.Module) for module in each.modules())
    return any(getattr(module, "uses_gradient_cache", False) for module in modules)


def _refuse_callback(trainer: Trainer) -> None:
    if any(isinstance(callback, ActivationOffloadCallback) for callback in trainer.callback_handler.callbacks):
        raise ValueError(
            "the trainer has an ActivationOffloadCallback, and two offloaders do not stack; remove it, since attach "
            "sees more"
        )


def _frozen_modules(trainer: Any, mode: str) -> dict[str, nn.Module]:
    """Return the models beside the learning one that do not consist of its own weights."""
    named = {name: getattr(trainer, name, None) for name in ("ref_model", "teacher_model")}
    named |= {f"reward_funcs[{i}]": each for i, each in enumerate(getattr(trainer, "reward_funcs", None) or [])}
    learning = set(trainer.model.parameters())
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        if isinstance(module, nn.Module) and module not in found.values() and learning.isdisjoint(module.parameters()):
            found[name] = module
    if not found:
        is_part = not all(parameter.requires_grad for parameter in learning)
        raise ValueError(
            f"frozen={mode!r}: this {type(trainer).__name__} has no ref_model, teacher_model or reward model of its own"
            f"{_about_no_reference(trainer)}; leave frozen out"
            + ("; base='host' is for the frozen weights of the model that learns" if is_part else "")
        )
    return found


def _about_no_reference(trainer: Any) -> str:
    if getattr(trainer, "ref_model", "not one of its attributes") is not None:
        return ""
    if is_peft_model(trainer.model):
        return "; its reference is the model that learns without the adapters, which takes no more memory"
    return "; it has no reference, which its settings do not need"


def _refuse_what_moves_them(trainer: Any, mode: str, modules: dict[str, nn.Module]) -> None:
    names = ", ".join(modules)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(f"frozen={mode!r}: DeepSpeed or FSDP places {names} of this trainer already; leave frozen out")
    if any(each.__name__ == "DistillationTrainer" for each in type(trainer).__mro__):
        raise ValueError(
            f"frozen={mode!r}: DistillationTrainer reads the output layer of {names} between calls, when it is on the "
            "host; leave frozen out, or train with GKDTrainer, which only calls its teacher"
        )
    for callback in trainer.callback_handler.callbacks:
        if any(value is module for value in vars(callback).values() for module in modules.values()):
            raise ValueError(
                f"frozen={mode!r}: {type(callback).__name__} changes the weights of {names} as training goes on; "
                "switch that off (sync_ref_model=False), or leave frozen out"
            )
