"""Read JSON and YAML files within bounds of size, depth and number of values, so that hostile ones raise ValueError."""

import json
import unicodedata
from pathlib import Path
from typing import Any

from hf_memopt.units import MIB, format_bytes

# Limits for a configuration; those of published models are far below.
_MAX_BYTES, _MAX_DEPTH, _MAX_VALUES, _MAX_NUMBER = 8 * MIB, 50, 200_000, 2**63
# Errors that PyYAML's constructors raise for broken files, besides its own.
_BROKEN = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


def read_values(path: Path) -> Any:
    """Read JSON, or YAML unless the file's name ends in .json.

    Raises:
        OSError: it cannot be opened.
        json.JSONDecodeError: it is no JSON.
        ValueError: it is no text or no YAML, or larger, deeper or fuller than a configuration, each alias of YAML
            counted where it stands; or a text in it has a control character. Names the field, but not the file.
    """
    with path.open("rb") as file:
        written = file.read(_MAX_BYTES + 1)
    if len(written) > _MAX_BYTES:
        raise ValueError(f"it is larger than {format_bytes(_MAX_BYTES)}, and no configuration")
    try:
        text = written.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("it is no text in UTF-8") from error
    try:
        values = json.loads(text) if path.suffix == ".json" else _parse_yaml(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep") from error
    _check(values)
    return values


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, *_BROKEN) as error:
        raise ValueError(f"it is no YAML ({' '.join(str(error).split())})") from error


def _check(values: Any) -> None:
    remaining = [("", values, 0)]
    count = 0
    while remaining:
        field, value, depth = remaining.pop()
        count += 1
        if count > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values, most of them in {field!r}")
        if depth > _MAX_DEPTH:
            raise ValueError(f"{field!r} is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            for key, each in value.items():
                remaining += [(field or _shown(key), part, depth + 1) for part in (key, each)]
        elif isinstance(value, list | tuple | set):
            remaining += [(field, each, depth + 1) for each in value]
        elif isinstance(value, str) and any(_is_control(letter) for letter in value):
            raise ValueError(f"{field!r}: {_shown(value)} has a character that is no text")
        elif isinstance(value, int) and abs(value) >= _MAX_NUMBER:
            raise ValueError(f"{field!r} is a number of more than 63 bits")


def _is_control(letter: str) -> bool:
    return letter not in "\t\n\r" and unicodedata.category(letter) in ("Cc", "Cs")


def _shown(value: Any) -> str:
    text = str(value)
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")[1:-1]
