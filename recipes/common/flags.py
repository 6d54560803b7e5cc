"""Flags as fields of dataclasses: numbers with the ranges in their types, and how all recipes read them."""

import difflib
import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from transformers import HfArgumentParser

from hf_memopt.command_line import Parser
from hf_memopt.command_line import flag as flag
from hf_memopt.planning.cards.gpus import find_card
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range, check_ranges
from hf_memopt.recipes.common.shipped_configs import config_file
from hf_memopt.text_files import read_values

# Numbers within a range, as types of fields.
Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_ZERO]
Seed = Annotated[int, SEED]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]
TwoOrMore = Annotated[int, Range(at_least=2, whole=True)]
HeldOut = Annotated[float, Range(above=0, below=1, why=", for example 0.02")]
# Of transformers' schedules those that need nothing but the numbers of updates.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]


class Formatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows defaults beside the flags, and the description as it was written."""


def read_options[T](kind: type[T], description: str, arguments: Sequence[str] | None, *, by_section: bool = False) -> T:
    """Return a `kind`, which is a named tuple of dataclasses, from flags and from the file of `--config_path FILE`.

    Each field is a flag, by its name alone or with its section: `--batch_size 8`, `--training.batch_size 8`; `--help`
    and errors name it with its section if `by_section`. The file, YAML or JSON, holds an object of sections with any of
    their fields; `config_file` finds it. Flags overrule it; of two equal ones the last counts.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser(kind, description, by_section=by_section)
    parser.add_argument("--config_path", metavar="FILE", help="YAML or JSON file of sections, with any of these fields")
    only_path = Parser(add_help=False, allow_abbrev=False)
    only_path.add_argument("--config_path")
    path = only_path.parse_known_args(given)[0].config_path
    # The file comes first, so that the command line's own flags, which come later, overrule it.
    from_file = [] if path is None else list(_words_of_file(Path(path), get_type_hints(kind)))
    found, unknown = parser.parse_known_args([*from_file, *given])
    refuse_unknown(unknown, parser)
    sections = {}
    for section, group in get_type_hints(kind).items():
        names = {each.name: _flag_name(section, each.name, by_section) for each in fields(group)}
        sections[section] = group(**{name: getattr(found, flag) for name, flag in names.items()})
        check_ranges(sections[section], names)
    return kind(**sections)


def write_options(path: Path, options: Any) -> Path:
    """Write the fields that differ from their defaults as a YAML file for `--config_path`, and return its path."""
    changed: dict[str, dict[str, Any]] = {}
    for name, section in options._asdict().items():
        defaults = vars(type(section)())
        differing = {field: value for field, value in vars(section).items() if value != defaults[field]}
        if differing:
            changed[name] = differing
    path.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    return path


def as_words(name: str, value: Any) -> list[str]:
    """Return a flag and its value, or values, as words of a command line; none for None and for no values."""
    if value is None or value == []:
        return []
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


def _parser(kind: type, description: str, *, by_section: bool) -> Parser:
    parser = Parser(description=description, formatter_class=Formatter, allow_abbrev=False)
    for section, group in get_type_hints(kind).items():
        box, hints = parser.add_argument_group(section), get_type_hints(group)
        for each in map(copy, fields(group)):  # it is changed here, and by transformers
            each.type = hints[each.name]
            each.name = _flag_name(section, each.name, by_section)
            HfArgumentParser._parse_dataclass_field(box, each)
        # Flags with their section's name and without it; `--help` and errors show one of both.
        for action in box._group_actions:
            bare = [name.removeprefix("--").removeprefix(f"{section}.") for name in action.option_strings]
            names = [f"--{prefix}{name}" for name in bare for prefix in ("", f"{section}.")]
            parser._option_string_actions |= dict.fromkeys(names, action)
    return parser


def _flag_name(section: str, name: str, by_section: bool) -> str:
    return f"{section}.{name}" if by_section else name


def refuse_unknown(words: Sequence[str], parser: ArgumentParser) -> None:
    if words:
        flags = {name: name for action in parser._actions for name in action.option_strings}
        if "." not in words[0]:  # then it is compared with fields without their sections
            flags = {f"--{name.removeprefix('--').rpartition('.')[2]}": name for name in flags}
        (nearest,) = difflib.get_close_matches(words[0], flags, n=1, cutoff=0.0)
        raise ValueError(f"{words[0]!r} is not a flag; the nearest is {flags[nearest]}. --help lists all")


def _words_of_file(path: Path, sections: dict[str, type]) -> Iterator[str]:
    is_json = path.suffix == ".json"
    remedy = "JSON; it has no comments, which a .yaml file may have" if is_json else "YAML"
    path = config_file("config_path", path)
    with explained(f"config_path={str(path)!r} cannot be read as {remedy}", (OSError, ValueError)):
        held = read_values(path)
    if not isinstance(held, dict):
        raise ValueError(f"config_path={str(path)!r} must hold an object with sections {', '.join(sections)}")
    for section, values in held.items():
        if section not in sections or not isinstance(values, dict):
            raise ValueError(f"{path}: no section {section!r}; there are {', '.join(sections)}")
        for name, value in values.items():
            if value is None and getattr(sections[section], name, None) is not None:
                raise ValueError(f"{section}.{name}=null: this field needs a value; leave it out for its default")
            yield from as_words(f"{section}.{name}", value)


def check_card(plan: str | None) -> None:
    if plan not in (None, "auto"):
        with explained(f"plan={plan!r}"):
            find_card(plan)


@contextmanager
def explained(refusal: str, caught: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Raise errors of loaders inside as a ValueError that begins with `refusal`: flag, value and remedy."""
    try:
        yield
    except caught as error:
        raise ValueError(f"{refusal}: {error}") from error


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise a ValueError that names the file, for whatever a reader raises at one that is damaged or holds objects."""
    try:
        yield
    except Exception as error:
        why = re.split(r"[.;:]?\s*(?:\n|\. |$)", str(error))[0]  # libraries go on with the way to run a file's code
        raise ValueError(f"{file} cannot be read ({type(error).__name__}: {why}); store plain numbers in it") from error


def as_settings(options: Any, *, by_section: bool = False) -> dict[str, Any]:
    return {
        _flag_name(section, name, by_section): value if isinstance(value, int | float) else str(value)
        for section, group in options._asdict().items()
        for name, value in asdict(group).items()
    }
