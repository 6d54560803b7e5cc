"""Runs a script as `every_trainer` does, with or without switches, and records its steps, for `hf-memopt verify`."""

import ast
import difflib
import functools
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Self, get_args, get_origin, get_type_hints
from unittest.mock import patch

import accelerate.commands.launch
import torch
from accelerate import Accelerator
from torch import nn
from transformers import HfArgumentParser, TrainingArguments, set_seed

from hf_memopt.callbacks.arguments import VARIABLE, MemoptArguments, words_of_setting
from hf_memopt.callbacks.every_trainer import NOTHING_ATTACHED, Attached, attached, run_script, show_messages
from hf_memopt.command_line import argparse_raising
from hf_memopt.exactness.recorder import Recorder, RecordingEnds
from hf_memopt.exactness.recording import Recording
from hf_memopt.process_trees import end_with_command
from hf_memopt.training.repeatable import deterministic_kernels

# Holds an `Order` as JSON.
ORDER_VARIABLE = "HF_MEMOPT_RECORD"
# A run of a few steps leaves nothing behind.
_FORCED = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "load_best_model_at_end": False,
    "push_to_hub": False,
}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OURS = tuple(each.name for each in fields(MemoptArguments))


class SwitchError(ValueError):
    """A switch that the script has no use for, or whose value it refuses."""


@dataclass
class Switches:
    """Switches by the place where they take effect: values, as text, by name."""

    arguments: dict[str, str] = field(default_factory=dict)  # fields of the script's TrainingArguments, or TRL's config
    environment: dict[str, str] = field(default_factory=dict)  # variables
    torch_flags: dict[str, str] = field(default_factory=dict)  # attributes of modules below `torch`, by dotted name
    ours: dict[str, str] = field(default_factory=dict)  # fields of `MemoptArguments`
    script: list[str] = field(default_factory=list)  # words added to the script's command line

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Self:
        """Return the switches that texts such as "gradient_checkpointing=true" name."""
        found = cls()
        for text in texts:
            if text.startswith("script:") and text != "script:":
                found.script.append(text.removeprefix("script:"))
                continue
            name, equals, value = text.partition("=")
            kind, colon, rest = name.rpartition(":")
            places = {"": found.ours if rest in _OURS else found.arguments}
            places |= {"env": found.environment, "torch": found.torch_flags}
            if not (equals and rest) or kind not in places or (colon and not kind):
                raise ValueError(
                    f"switch={text!r} is none; use FIELD=VALUE of the script's training arguments or of hf_memopt, "
                    "env:NAME=VALUE, torch:MODULE.FLAG=VALUE, or script:WORD"
                )
            if rest in places[kind]:
                raise ValueError(f"switch={text!r}: {rest} has the value {places[kind][rest]!r} already; name it once")
            places[kind][rest] = value
        if VARIABLE in found.environment:
            raise ValueError(f"switch=env:{VARIABLE}: a run that is recorded does not read it; use FIELD=VALUE")
        found.make_memopt()
        for name, value in found.torch_flags.items():
            _torch_flag(name, value)
        return found

    @property
    def are_fields_alone(self) -> bool:
        return not (self.environment or self.torch_flags or self.ours or self.script)

    def check_that_they_change(self) -> None:
        """Raise SwitchError for a variable, or a flag of torch, that has its value in the plain run already."""
        texts = [f"env:{name}={value}" for name, value in self.environment.items() if os.environ.get(name) == value]
        for name, text in self.torch_flags.items():
            owner, attribute, value = _torch_flag(name, text)
            if getattr(owner, attribute) == value:
                texts.append(f"torch:{name}={text}")
        if texts:
            raise SwitchError(f"switch={texts[0]}: the plain run has that value already; name another one")

    def make_memopt(self) -> MemoptArguments | None:
        """Return the arguments of this library if a switch names one; on a CPU, copies are performed."""
        if not self.ours:
            return None
        given = {"offload": "off", "memory_log": "false", **self.ours}
        if given["offload"] != "off" and "disk" not in given:
            given.setdefault("cpu_copies", "true")
        words = [word for name, value in given.items() for word in words_of_setting(name, value)]
        try:
            return MemoptArguments.from_words(words)[0]
        except ValueError as error:
            texts = joined(self.ours)
            raise ValueError(f"switch={texts}: {_reason(error)}") from error


class SwitchedArguments:
    """Sets fields of every TrainingArguments, or config derived from it, that this process makes from now on.

    Each class is given the fields when its first instance is made, in any module: `__new__` comes before
    `__init__`. There is no way back, since Python cannot forget a `__new__`.

    Args:
        switches: must be fields of the class, or making an instance raises ValueError.
        is_switched: whether they are set; otherwise their names and values are only checked.
        forced: fields that are set in any case, where the class has them.
        must_change: whether a plain run raises ValueError if the script gives its fields these values already.
    """

    def __init__(
        self, switches: dict[str, str], forced: dict[str, Any], *, is_switched: bool, must_change: bool
    ) -> None:
        self._switches, self._forced, self._is_switched = switches, forced, is_switched
        self._must_change = must_change and bool(switches)
        self._classes: set[type] = set()
        self.were_used = False

    def install(self) -> None:
        def new(cls: type[TrainingArguments], *args: Any, **kwargs: Any) -> TrainingArguments:
            self._switch(cls)
            return object.__new__(cls)

        TrainingArguments.__new__ = new

    def _switch(self, cls: type[TrainingArguments]) -> None:
        if cls in self._classes:
            return
        self._classes.add(cls)
        make: Any = cls.__init__
        names = [each.name for each in fields(cls) if each.init]

        @functools.wraps(make)
        def make_switched(made: TrainingArguments, *args: Any, **kwargs: Any) -> None:
            forced = {name: value for name, value in self._forced.items() if name in names}
            given = dict(zip(names, args, strict=False)) | kwargs | forced
            parsed = self._parsed(cls)
            make(made, **given | (parsed if self._is_switched else {}))
            self.were_used = True
            is_compared = self._must_change and not self._is_switched
            if is_compared and all(getattr(made, name) == value for name, value in parsed.items()):
                raise SwitchError(
                    f"switch={joined(self._switches)}: the script's {type(made).__name__} has that already, so that "
                    "there is nothing to compare; name another value, or change the script"
                )

        cls.__init__ = make_switched

    def _parsed(self, cls: type[TrainingArguments]) -> dict[str, Any]:
        known = [each.name for each in fields(cls)]
        for name in self._switches:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *_OURS], n=3)
                similar = f"; similar are {', '.join(near)}" if near else ""
                raise SwitchError(f"switch={name}={self._switches[name]}: {cls.__name__} has no such field{similar}")
        parser = HfArgumentParser(cls, allow_abbrev=False)
        return {name: self._value(cls, parser, name, text) for name, text in self._switches.items()}

    def _value(self, cls: type[TrainingArguments], parser: HfArgumentParser, name: str, text: str) -> Any:
        if text.lower() in ("none", "null") and _takes_none(cls, name):
            return None
        try:
            with argparse_raising():
                found, _ = parser.parse_known_args([f"--{name}={text}"])
        except ValueError as error:
            raise SwitchError(f"switch={name}={text}: {_reason(error)}; use a value of {cls.__name__}") from error
        return getattr(found, name)


def _takes_none(cls: type, name: str) -> bool:
    """Return whether the text "none" means None for a field, and no word."""
    kinds = get_args(get_type_hints(cls)[name])
    return NoneType in kinds and (str not in kinds or any(dict in (kind, get_origin(kind)) for kind in kinds))


def joined(switches: dict[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in switches.items())


def _reason(error: ValueError) -> str:
    return str(error).removesuffix("; --help lists all options")


def set_torch_flags(flags: dict[str, str]) -> None:
    """Set attributes of modules below `torch`, such as "_functorch.config.activation_memory_budget"."""
    for name, text in flags.items():
        setattr(*_torch_flag(name, text))


def _torch_flag(name: str, text: str) -> tuple[Any, str, Any]:
    """Return the object that has a flag, the flag's name in it, and its value from a text."""
    path, _, attribute = f"torch.{name}".rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        now = getattr(owner, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"switch=torch:{name}={text}: there is no flag torch.{name}; check its name in this version of torch"
        ) from error
    value = _literal(text)
    kind = "true or false" if isinstance(now, bool) else "a number" if isinstance(now, int | float) else None
    if kind and (not isinstance(value, int | float) or isinstance(value, bool) != isinstance(now, bool)):
        raise ValueError(f"switch=torch:{name}={text}: torch.{name} is {now!r} without it; use {kind}")
    return owner, attribute, value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class Order:
    folder: str  # each rank writes `rank-N.json` into it
    num_steps: int
    perturbed: str | None  # name of a dtype: each weight is changed by one unit in its last place; None: no change
    in_float32: bool  # whether autocast and TF32 are off
    seed: int  # of all generators before the script begins
    switches: list[str]  # their texts
    is_switched: bool  # whether they are on; in a plain run their names and values are only checked


def recording_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def mistake_file(folder: Path) -> Path:
    """Return the file that holds the message if a switch was wrong."""
    return folder / "mistake.txt"


def main(words: Sequence[str]) -> None:
    order = Order(**json.loads(os.environ[ORDER_VARIABLE]))
    end_with_command(removing=Path(order.folder).parent)
    show_messages()
    set_seed(order.seed)
    try:
        recording = _recorded(order, words)
    except SwitchError as error:
        mistake_file(Path(order.folder)).write_text(str(error), encoding="utf-8")
        raise
    recording.write(recording_file(Path(order.folder), int(os.environ.get("RANK", "0"))))


def _recorded(order: Order, words: Sequence[str]) -> Recording:
    switches = Switches.from_texts(order.switches)
    memopt = switches.make_memopt() if order.is_switched else None
    if order.is_switched:
        set_torch_flags(switches.torch_flags)
    else:
        switches.check_that_they_change()
    recorder = Recorder(order.num_steps, perturbed=order.perturbed, in_float32=order.in_float32)
    with ExitStack() as stack:
        enter = stack.enter_context
        # In the command's own folder, which goes with it.
        output = enter(tempfile.TemporaryDirectory(dir=Path(order.folder).parent))
        forced = {**_FORCED, "output_dir": output}
        arguments = SwitchedArguments(
            switches.arguments, forced, is_switched=order.is_switched, must_change=switches.are_fields_alone
        )
        arguments.install()
        enter(deterministic_kernels())
        found = Attached() if memopt is None else enter(attached(memopt))
        enter(patch.object(accelerate.commands.launch, "launch_command", _refuse_launch))
        enter(_models_named(recorder))
        try:
            with recorder:
                run_script(words)
        except RecordingEnds:
            pass
        except SystemExit as end:  # of a script that has ended well
            if end.code not in (None, 0):
                raise
        if switches.arguments and not arguments.were_used:
            name, value = next(iter(switches.arguments.items()))
            raise SwitchError(
                f"switch={name}={value} reaches nothing: the script makes no TrainingArguments or TRL config; use "
                "script:WORD, env:NAME=VALUE or torch:MODULE.FLAG=VALUE"
            )
        if memopt is not None:
            _check_effect(switches, memopt, found)
    return recorder.recording


def _refuse_launch(*args: Any) -> None:
    raise SwitchError(
        "the script starts another one in processes that are not recorded; name that one, such as -m trl.scripts.sft "
        "for trl sft"
    )


def _check_effect(switches: Switches, memopt: MemoptArguments, found: Attached) -> None:
    if not found.is_any:
        raise SwitchError(f"switch={joined(switches.ours)} reaches nothing: {NOTHING_ATTACHED}")
    if found.unreached:
        raise SwitchError(f"switch={found.unreached[0]}")
    if found.optimizers is not None and found.optimizers.unreached:
        raise SwitchError(f"switch={found.optimizers.unreached}")
    if memopt.offload != "off" and not any(each.stats.bytes_moved for each in found.offloaders):
        raise SwitchError(
            f"switch=offload={memopt.offload} moved no bytes: storages below offload_threshold_mb="
            f"{memopt.offload_threshold_mb:g} MiB stay; add --switch offload_threshold_mb=0"
        )


@contextmanager
def _models_named(recorder: Recorder) -> Iterator[None]:
    """Name parameters after the models that a script prepares, whose parts it may call before."""
    prepare = Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_and_name(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                recorder.add_model(model)
        if accelerator.mixed_precision in _PRECISIONS:
            recorder.note_precision(_PRECISIONS[accelerator.mixed_precision])
        return prepare(accelerator, *args, **kwargs)

    with patch.object(Accelerator, "prepare", prepare_and_name):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
