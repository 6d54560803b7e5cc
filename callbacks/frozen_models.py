"""Frozen models of TRL's trainers, which live off the device between their calls."""

import logging
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.weights import OffloadedTeacher, VisitsByCall
from hf_memopt.weights.homes.home import Home
from hf_memopt.weights.homes.weight_files import loaded_from
from hf_memopt.weights.strategies.auto import TeacherMode

logger = logging.getLogger(__name__)


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
        modules = frozen_modules(self._trainer)
        _refuse_none(self._trainer, self.mode, modules)
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


def frozen_modules(trainer: Any) -> dict[str, nn.Module]:
    """Return the models that a trainer only calls and that do not consist of the learning one's weights."""
    named = {name: getattr(trainer, name, None) for name in ("ref_model", "teacher_model")}
    named |= {f"reward_funcs[{i}]": each for i, each in enumerate(getattr(trainer, "reward_funcs", None) or [])}
    learning = set(trainer.model.parameters())
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        if isinstance(module, nn.Module) and module not in found.values() and learning.isdisjoint(module.parameters()):
            found[name] = module
    return found


def _refuse_none(trainer: Any, mode: str, modules: dict[str, nn.Module]) -> None:
    if not modules:
        is_part = not all(parameter.requires_grad for parameter in trainer.model.parameters())
        raise ValueError(
            f"frozen={mode!r}: this {type(trainer).__name__} has no ref_model, teacher_model or reward model of its own"
            f"{_about_no_reference(trainer)}; leave frozen out"
            + ("; base='host' is for the frozen weights of the model that learns" if is_part else "")
        )


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
