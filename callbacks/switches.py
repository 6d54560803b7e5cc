"""Switches of `hf-memopt verify`: settings that one run of a script has and the other has not."""

import ast
import difflib
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from transformers import HfArgumentParser, TrainingArguments

from hf_memopt.callbacks.arguments import MemoptArguments
from hf_memopt.command_line import argparse_raising

_OURS = tuple(each.name for each in fields(MemoptArguments))


class SwitchError(ValueError):
    """A switch that the script has no use for, or whose value it refuses."""


@dataclass
class Switches:
    """Switches by the place where they take effect.

    Attributes:
        arguments: fields of the script's TrainingArguments, or of TRL's config, by name, as text.
        environment: variables.
        torch_flags: attributes of modules below `torch`, by dotted name.
        ours: fields of `MemoptArguments`, as text.
        script: words added to the script's command line.
    """

    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    torch_flags: dict[str, str] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    script: list[str] = field(default_factory=list)

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Self:
        """Return the switches that texts such as "gradient_checkpointing=true" name.

        Raises:
            ValueError: a text has no form of a switch, or a switch of ours a value out of its range.
        """
        found = cls()
        for text in texts:
            if text.startswith("script:"):
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
            places[kind][rest] = value
        found.make_memopt()
        for name in found.torch_flags:
            _torch_flag(name)
        return found

    def make_memopt(self) -> MemoptArguments | None:
        """Return the arguments of this library if a switch names one; on a CPU, copies are performed."""
        if not self.ours:
            return None
        given = {"offload": "off", **self.ours}
        given.setdefault("memory_log", "false")
        if given["offload"] != "off" and "disk" not in given:
            given.setdefault("cpu_copies", "true")
        words = [f"--{name}={value}" for name, value in given.items()]
        return MemoptArguments.from_words(words)[0]


class SwitchedArguments:
    """Sets fields of every TrainingArguments, or config derived from it, that this process makes from now on.

    Each class is given the fields when its first instance is made, whoever has defined it: `__new__` comes before
    `__init__`. There is no way back, since Python cannot forget a `__new__`.

    Args:
        switches: must be fields of the class, or making an instance raises ValueError.
        is_switched: whether they are set; otherwise their names and values are only checked.
        forced: fields that are set in any case, where the class has them.
    """

    def __init__(self, switches: dict[str, str], forced: dict[str, Any], *, is_switched: bool) -> None:
        self._switches, self._forced, self._is_switched = switches, forced, is_switched
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

        cls.__init__ = make_switched

    def _parsed(self, cls: type[TrainingArguments]) -> dict[str, Any]:
        known = [each.name for each in fields(cls)]
        for name in self._switches:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *_OURS], n=3)
                similar = f"; similar are {', '.join(near)}" if near else ""
                raise SwitchError(f"switch={name}={self._switches[name]}: {cls.__name__} has no such field{similar}")
        words = [f"--{name}={value}" for name, value in self._switches.items()]
        try:
            with argparse_raising():
                found, _ = HfArgumentParser(cls, allow_abbrev=False).parse_known_args(words)
        except ValueError as error:
            raise SwitchError(f"switch={' '.join(words)}: {error}") from error
        return {name: getattr(found, name) for name in self._switches}


def set_torch_flags(flags: dict[str, str]) -> None:
    """Set attributes of modules below `torch`, such as "_functorch.config.activation_memory_budget"."""
    for name, text in flags.items():
        owner, attribute = _torch_flag(name)
        setattr(owner, attribute, _literal(text))


def _torch_flag(name: str) -> tuple[Any, str]:
    """Return the object that has a flag, and the flag's name in it."""
    path, _, attribute = f"torch.{name}".rpartition(".")
    try:
        owner: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        owner = functools.reduce(lambda found, part: getattr(found, part, None), path.split(".")[1:], _torch())
    if not hasattr(owner, attribute):
        raise ValueError(f"switch=torch:{name}: there is no flag torch.{name}; check its name in this version of torch")
    return owner, attribute


def _torch() -> Any:
    return importlib.import_module("torch")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text
