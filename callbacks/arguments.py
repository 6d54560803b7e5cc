"""`MemoptArguments`: everything that `attach` switches on, for command lines, YAML files and a variable's text."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_memopt.activations.offload_arguments import OffloadArguments
from hf_memopt.callbacks.attach import Attachment, attach, attach_fit
from hf_memopt.callbacks.fit import Fit
from hf_memopt.callbacks.homes import stream_base, stream_trainer
from hf_memopt.command_line import argparse_raising, flag
from hf_memopt.ranges import NOT_NEGATIVE, POSITIVE, check_ranges
from hf_memopt.weights import StreamedWeights

# Holds, for instance, "offload=auto,budget_gib=6".
VARIABLE = "HF_MEMOPT"
# Fields that `fit` chooses.
_DECIDED = (
    "offload",
    "budget_gib",
    "offload_threshold_mb",
    "base",
    "base_budget_gib",
    "trained",
    "frozen",
    "optimizer_home",
    "optimizer_budget_gib",
    "selective_checkpointing",
)
# Fields of several words; other values, such as a folder's name, may hold spaces.
_LISTS = ("skip",)


def words_of(text: str) -> list[str]:
    """Return "offload=auto,skip=visual lm_head" as words of a command line."""
    parts = [setting.strip().partition("=") for setting in text.split(",") if setting.strip()]
    settings = {name: value if equals else None for name, equals, value in parts}
    return [word for name, value in settings.items() for word in words_of_setting(name, value)]


def words_of_setting(name: str, value: str | None) -> list[str]:
    """Return a field and its value, its values or none, as words of a command line."""
    if value is None:
        return [f"--{name}"]
    values = value.split() if name in _LISTS else [value]
    return [f"--{name}", *values] if len(values) > 1 else [f"--{name}={value}"]


@dataclass
class MemoptArguments(OffloadArguments):
    """Options of `attach`, with its defaults, for `HfArgumentParser` and TRL's `TrlParser`.

    Each field is a flag and a key in a YAML file; its help text gives the meaning.

    Raises:
        ValueError: a field is out of range, or has no effect without another one.

    Example:
        >>> parser = HfArgumentParser((TrainingArguments, MemoptArguments))
        >>> args, memopt = parser.parse_args_into_dataclasses()
        >>> trainer = Trainer(model, args, train_dataset=dataset)
        >>> memopt.attach(trainer)
    """

    base: Literal["off", "auto", "host", "file"] = flag(
        "off",
        "home of the model's frozen weights, from which they visit the device: host memory, or their safetensors files",
    )
    base_budget_gib: Annotated[float, NOT_NEGATIVE] | None = flag(
        None, "device memory that the frozen weights may take, in GiB; the more, the less is copied"
    )
    trained: bool = flag(
        False, "weights that train have the home of --base, too, with their gradients and the optimizer's state"
    )
    frozen: Literal["off", "auto", "resident", "swap", "stream"] = flag(
        "off",
        "where TRL's reference model, teacher and reward models wait for their calls; off: as the trainer has them",
    )
    frozen_home: Literal["host", "file"] = flag(
        "host", "where they wait: in host memory, or in their safetensors files"
    )
    optimizer_home: Literal["off", "host", "file"] = flag(
        "off", "where the optimizer's state lives between updates: in host memory, or in a file in --disk"
    )
    optimizer_budget_gib: Annotated[float, NOT_NEGATIVE] | None = flag(
        None, "device memory for optimizer state that stays, in GiB"
    )
    selective_checkpointing: bool = flag(
        False, "checkpoint the model's blocks, but keep the results of their expensive operations"
    )
    fit: bool = flag(False, "decide all of this, so that training fits in the memory that there is")
    memory_gib: Annotated[float, POSITIVE] | None = flag(
        None, "fit: device memory that training may take, in GiB; on a CPU that of the process"
    )
    max_waiting: Annotated[float, NOT_NEGATIVE] | None = flag(
        None, "fit: end training that waits for more than this share of the time in which it computes"
    )
    memory_log: bool = flag(True, "log peak memory with the loss, and explain out-of-memory errors")
    leak_check: bool = flag(False, "warn once if every step leaves memory behind")
    memory_report: bool = flag(False, "when training ends, write report/report.html into the output folder")

    def __post_init__(self) -> None:
        check_ranges(self)
        super().__post_init__()
        for field in fields(self):
            value, known = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in known:
                raise ValueError(f"{field.name}={value!r} is unknown; choose from {', '.join(known)}")
        if self.base_budget_gib is not None and self.base == "off":
            raise ValueError(f"base_budget_gib={self.base_budget_gib} needs base=auto, host or file, and base=off")
        if self.optimizer_budget_gib is not None and self.optimizer_home == "off":
            raise ValueError(
                f"optimizer_budget_gib={self.optimizer_budget_gib} needs optimizer_home=host or file, and "
                "optimizer_home=off"
            )
        if self.trained and self.base == "off":
            raise ValueError("trained=True needs base=auto, host or file, and base=off")
        if self.frozen_home != "host" and self.frozen == "off":
            raise ValueError(f"frozen_home={self.frozen_home} needs frozen=auto, swap or stream, and frozen=off")
        if self.budget_gib is not None and self.offload != "auto":
            raise ValueError(f"budget_gib={self.budget_gib} needs offload=auto, and offload={self.offload!r}")
        for name in ("memory_gib", "max_waiting"):
            if getattr(self, name) is not None and not self.fit:
                raise ValueError(f"{name}={getattr(self, name)} needs fit=True, and fit=False")
        if self.fit:
            defaults = {each.name: each.default for each in fields(self)}
            if decided := [name for name in _DECIDED if getattr(self, name) != defaults[name]]:
                value = getattr(self, decided[0])
                raise ValueError(f"fit=True decides {decided[0]} by itself, and {decided[0]}={value}; leave it out")
        if self.memory_report and not self.memory_log:
            raise ValueError("memory_report=True shows what memory_log=False leaves out; switch memory_log on")

    def stream_base(
        self, model: nn.Module | None, args: TrainingArguments | None, device: torch.device | None = None
    ) -> StreamedWeights | None:
        """Stream the weights of a model as `base` and `trained` say, before a trainer with these arguments moves it.

        `attach` does the same, but only after the trainer has moved the model. Without a trainer, `device` runs it.
        """
        if self.base == "off":
            return None
        return stream_base(model, args, self.base, device=device, **self._settings_of_base())

    def attach(self, trainer: Trainer) -> Attachment:
        """Attach this to a trainer, as `hf_memopt.attach` does."""
        if self.fit:
            return attach_fit(trainer, Fit(**self.settings_of_fit()))
        return attach(
            trainer,
            base=None if self.base == "off" else stream_trainer(trainer, self.base, **self._settings_of_base()),
            offloader=self.make_offloader(trainer.args.device),
            trained=self.trained,
            frozen=None if self.frozen == "off" else self.frozen,
            frozen_home=self.frozen_home,
            optimizer_home=None if self.optimizer_home == "off" else self.optimizer_home,
            optimizer_disk=self.disk,
            optimizer_budget_gib=self.optimizer_budget_gib,
            selective_checkpointing=self.selective_checkpointing,
            memory=self.memory_log,
            leak_check=self.leak_check,
            memory_report=self.memory_report,
        )

    def settings_of_fit(self) -> dict[str, Any]:
        """Return the arguments of a `Fit`."""
        names = "memory_gib", "host_budget_gib", "disk", "disk_budget_gib", "max_waiting"
        return {name: getattr(self, name) for name in names}

    def _settings_of_base(self) -> dict[str, Any]:
        return {"trained": self.trained, "budget_gib": self.base_budget_gib, "disk": self.disk}

    @classmethod
    def from_words(cls, words: Sequence[str]) -> tuple[Self, list[str]]:
        """Return the arguments that words of a command line give, and the words that are none of them.

        Raises:
            ValueError: a value is none of its type or range.
        """
        parser = HfArgumentParser(cls, allow_abbrev=False, add_help=False)
        with argparse_raising():
            found, others = parser.parse_args_into_dataclasses(
                list(words), return_remaining_strings=True, look_for_args_file=False
            )
        return found, others

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the arguments that a text such as "offload=auto,budget_gib=6" gives; an empty one, the defaults.

        Raises:
            ValueError: it names no field, or a value is none of its type or range.
        """
        try:
            found, others = cls.from_words(words_of(text))
            if others:
                known = ", ".join(field.name for field in fields(cls))
                raise ValueError(f"{others[0].removeprefix('--')!r} sets no field; there are {known}")
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={text!r}: {error}") from error
        return found

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        given, defaults = vars(self), vars(type(self)())
        changed = {name: value for name, value in given.items() if value != defaults[name]}
        texts = {name: " ".join(value) if isinstance(value, list) else str(value) for name, value in changed.items()}
        return ",".join(f"{name}={text}" for name, text in texts.items())
