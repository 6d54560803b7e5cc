"""Reads a configuration in sections from a JSON file and the command line."""

import argparse
import difflib
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_memopt.command_line import Parser
from hf_memopt.recipes.lgt.config import Config

SECTIONS: dict[str, type] = Config.__annotations__


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.MetavarTypeHelpFormatter):
    """The description as it was written, and what a value may be beside each flag."""


def read_config(description: str, arguments: Sequence[str] | None = None) -> Config:
    """The defaults, the file that `--config_path` names over them, and the command line's own fields over these.

    Raises:
        ValueError: names a field, its value and the remedy; for one that there is not, the one with the nearest name.
    """
    parser = _parser(description)
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(_complaint(unknown[0].removeprefix("--").partition("=")[0], "command line"))
    given = vars(found)
    path = given.pop("config_path")
    values = ({} if path is None else _read_file(Path(path))) | {
        name: _parsed(name, value) for name, value in given.items()
    }
    return make_config(values)


def make_config(values: dict[str, Any]) -> Config:
    """A configuration of the given fields, named `section.field`, and defaults for the others.

    Raises:
        ValueError: as `read_config`.
    """
    known = dict(_known_fields())
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in values.items():
        if name not in known:
            raise ValueError(_complaint(name, "configuration"))
        section, _, field = name.partition(".")
        sections[section][field] = _checked(name, value, known[name])
    config = Config(**{name: kind(**sections[name]) for name, kind in SECTIONS.items()})
    config.check()
    return config


def _known_fields() -> Iterator[tuple[str, Any]]:
    """Each field as `section.field`, with its type."""
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        yield from ((f"{section}.{field.name}", hints[field.name]) for field in fields(kind))


def _parser(description: str) -> argparse.ArgumentParser:
    parser = Parser(description=description, formatter_class=_Formatter, allow_abbrev=False)
    parser.add_argument("--config_path", type=str, help="JSON file of sections, with any of the fields below")
    for section, kind in SECTIONS.items():
        group, hints = parser.add_argument_group(section), get_type_hints(kind)
        for field in fields(kind):
            hint = hints[field.name]
            text = f"{field.metadata['help']} (default: {json.dumps(field.default)})".replace("%", "%%")
            optional = {"nargs": "?", "const": "true"} if hint is bool else {}
            name = f"--{section}.{field.name}"
            group.add_argument(
                name, default=argparse.SUPPRESS, metavar=_type_name(hint), help=text, type=str, **optional
            )
    return parser


def _read_file(path: Path) -> dict[str, Any]:
    try:
        sections = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config_path={str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(sections, dict):
        raise ValueError(f"config_path={str(path)!r} must hold an object with sections {', '.join(SECTIONS)}")
    values = {}
    for section, content in sections.items():
        if section not in SECTIONS or not isinstance(content, dict):
            raise ValueError(f"{path}: no section {section!r}; there are {', '.join(SECTIONS)}")
        values |= {f"{section}.{name}": value for name, value in content.items()}
    return values


def _complaint(name: str, where: str) -> str:
    known = {field if "." in name else field.partition(".")[2]: field for field, _ in _known_fields()}
    (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{where}: no field {name!r}; the nearest is {known[near]!r}. --help lists all"


def _parsed(name: str, text: str) -> Any:
    """A value as JSON would have it; texts need no quotation marks."""
    hint = dict(_known_fields())[name]
    if hint is str or get_origin(hint) is Literal:
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value, which has to be of the field's type; whole numbers may stand for others."""
    if get_origin(hint) is Literal:
        fits = value in get_args(hint)
    elif get_origin(hint) in (Union, types.UnionType):
        return None if value is None else _checked(name, value, get_args(hint)[0])
    elif get_origin(hint) is list:
        fits = isinstance(value, list)
        value = [_checked(name, each, get_args(hint)[0]) for each in value] if fits else value
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is hint
    if not fits:
        raise ValueError(f"{name}={value!r} must be {_type_name(hint)}")
    return value


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return f"{_type_name(get_args(hint)[0])}|null"
    if get_origin(hint) is list:
        return f"[{_type_name(get_args(hint)[0])},...]"
    return {int: "int", float: "float", bool: "true|false", str: "text"}[hint]
