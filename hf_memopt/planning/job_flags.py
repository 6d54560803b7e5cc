"""The fields of a `Job` as flags of a command, and `--spec FILE`."""

import argparse
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hf_memopt.command_line import number
from hf_memopt.planning.job import (
    DEFAULTS,
    FIELDS,
    MODIFIERS,
    NOT_CLIPPED,
    REMEDIES,
    STAND_FOR,
    Job,
    SpecField,
    read_spec,
)

_NAMES = {*FIELDS, *STAND_FOR, *MODIFIERS, *REMEDIES}


def add_flags(group: Any, *names: str, are_alone: bool = True) -> None:
    """Add flags without defaults: those that are not typed leave no trace.

    Where they are not alone, the names that fields have in a trainer's settings are another parser's.
    """
    for name in names:
        each = FIELDS[name]
        default = f" (default: {DEFAULTS[name]})" if name in DEFAULTS else ""
        options = each.options | {"help": each.options["help"] + default} | _reading(each)
        group.add_argument(*(each.flags if are_alone else [each.flag]), dest=name, **options, default=argparse.SUPPRESS)


def add_other_names(parser: argparse.ArgumentParser) -> None:
    """Add the flags of transformers' and TRL's scripts that stand for ours; `--help` does not show them."""
    for name in (*STAND_FOR, *MODIFIERS, *REMEDIES):
        flag, hidden = f"--{name.replace('_', '-')}", argparse.SUPPRESS
        parser.add_argument(flag, nargs="?", const=True, type=_switch, default=hidden, help=hidden)


def _switch(text: str) -> Any:
    known = {"true": True, "false": False}
    return known.get(text.lower(), int(text) if text.isdigit() else text)


def spec_of(parsed: argparse.Namespace) -> Job:
    """Return the job; flags win over the file of `--spec`."""
    with flags_named({"spec"}):
        held = read_spec(parsed.spec) if "spec" in parsed else Job()
    given = {name: value for name, value in vars(parsed).items() if name in _NAMES}
    with flags_named(given):
        return replace(held, **Job(**given).said())


def _reading(each: SpecField) -> dict[str, Any]:
    if each.kind is bool:
        return {"action": "store_true"}
    if each.kind is list:
        return {"action": "append"}
    if each.allowed is not None:
        parse = _with_thousands(number(each.allowed)) if each.name == "seq_len" else number(each.allowed)
        return {"type": _or_none(parse) if each.kind is float else parse}
    return {"type": each.renewed if each.kind is str else each.kind}


def _with_thousands(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Take `4k` for 4,096 tokens."""

    def parse_other(text: str) -> Any:
        is_short = text.lower().endswith("k") and text[:-1].isdigit()
        return parse(str(1024 * int(text[:-1])) if is_short else text)

    parse_other.__name__ = parse.__name__
    return parse_other


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_other(text: str) -> Any:
        return text if text == NOT_CLIPPED else parse(text)

    parse_other.__name__ = parse.__name__
    return parse_other


@contextmanager
def flags_named(names: Collection[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        message = with_flags(str(error), names)
        if message == str(error):
            raise
        raise ValueError(message) from error


def with_flags(message: str, names: Collection[str]) -> str:
    """Return a message with flags for fields: `seq_len=0` becomes `--seq-len=0`, `padding=True` becomes `--padding`.

    A field of one word is one only before "=". The field of a configuration that follows its model's name is none.
    """
    for name in names:
        is_switch = name in FIELDS and FIELDS[name].kind is bool
        value = "=True" if is_switch else "(?==)"
        written = rf"{name}(?:{value})?\b" if "_" in name else f"{name}{value}"
        message = re.sub(rf"(?<!': )(?<![\w.'/-]){written}", f"--{name.replace('_', '-')}", message)
    return message
