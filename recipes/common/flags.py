"""Flags as fields of dataclasses: numbers with the ranges in their types, and how they are read."""

import difflib
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from transformers import HfArgumentParser

from hf_memopt.command_line import Parser
from hf_memopt.estimate.gpus import find_card
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range

Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_ZERO]
Seed = Annotated[int, SEED]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]

# Of transformers' schedules those that need nothing but the numbers of updates.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]


def flag(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


class _Formatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Defaults beside the flags, and the description as it was written."""


class _FlagParser(HfArgumentParser):  # type: ignore[misc]
    error = Parser.error


def read_flags(groups: Iterable[type], description: str, arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One instance of each dataclass in `groups`; `@FILE` stands for the flags in a file, one per line.

    Raises:
        ValueError: a flag is unknown, or its value none of its type or range.
    """
    parser = _FlagParser(
        groups,
        description=description,
        formatter_class=_Formatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    *options, unknown = parser.parse_args_into_dataclasses(
        arguments, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        flags = [name for action in parser._actions for name in action.option_strings]
        (nearest,) = difflib.get_close_matches(unknown[0], flags, n=1, cutoff=0.0)
        raise ValueError(f"{unknown[0]!r} is no flag; the nearest is {nearest}. --help lists all")
    for group in options:
        check_ranges(group)
    return tuple(options)


def check_ranges(group: Any, prefix: str = "") -> None:
    """Refuse numbers outside of the ranges in the types of their fields.

    Raises:
        ValueError: names the first of them.
    """
    for name, hint in get_type_hints(type(group), include_extras=True).items():
        for allowed in ranges_in(hint):
            value = getattr(group, name)
            for each in value if isinstance(value, list) else [value]:
                allowed.check(f"{prefix}{name}", each)


def ranges_in(hint: Any) -> Iterator[Range]:
    """The ranges of a number, an optional one, or a list of numbers."""
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range))
    for part in get_args(hint):
        yield from ranges_in(part)


def check_card(plan: str | None) -> None:
    """Refuse a `plan` that is neither "auto" nor the name or size of a card; None stands for no plan."""
    if plan not in (None, "auto"):
        try:
            find_card(plan)
        except ValueError as error:
            raise ValueError(f"plan={plan!r}: {error}") from error


def as_settings(groups: Iterable[Any]) -> dict[str, Any]:
    """All flags in one dictionary, as trackers take them: numbers and strings."""
    flags = {name: value for group in groups for name, value in asdict(group).items()}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in flags.items()}
