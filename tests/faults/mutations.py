"""Damage to files, drawn from a seed, and counts of its outcomes."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], None]


def flip_bit(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, dice: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: dice.randrange(len(content))])


def append(file: Path, dice: random.Random) -> None:
    file.write_bytes(file.read_bytes() + dice.randbytes(dice.randrange(1, 9)))


def empty(file: Path, dice: random.Random) -> None:
    file.write_bytes(b"")


def overwrite(file: Path, dice: random.Random) -> None:
    """Write as many bytes without meaning, which are no text either."""
    file.write_bytes(b"\xff" + dice.randbytes(max(file.stat().st_size - 1, 0)))


def delete(file: Path, dice: random.Random) -> None:
    file.unlink()


def swap_with_neighbour(file: Path, dice: random.Random) -> None:
    others = [each for each in sorted(file.parent.iterdir()) if each.is_file() and each != file]
    other = dice.choice(others or [file])
    ours, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(ours)


def turn_into_folder(file: Path, dice: random.Random) -> None:
    file.unlink()
    file.mkdir()


def link_to_nothing(file: Path, dice: random.Random) -> None:
    file.unlink()
    file.symlink_to("nothing")


def link_to_itself(file: Path, dice: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


ANY_FILE: tuple[Mutation, ...] = (
    flip_bit,
    truncate,
    append,
    empty,
    overwrite,
    delete,
    swap_with_neighbour,
    turn_into_folder,
    link_to_nothing,
    link_to_itself,
)


def drop_key(file: Path, dice: random.Random) -> None:
    def drop(holder: Any, key: Any) -> None:
        del holder[key]

    _edit_json(file, dice, drop)


def change_value(file: Path, dice: random.Random) -> None:
    """Put another value of the same type, as a person or a script would."""

    def change(holder: Any, key: Any) -> None:
        holder[key] = _another(holder[key], dice)

    _edit_json(file, dice, change)


def change_type(file: Path, dice: random.Random) -> None:
    def change(holder: Any, key: Any) -> None:
        wrong = [None, -1, 1.5, "text", [], {}, True]
        holder[key] = dice.choice([each for each in wrong if type(each) is not type(holder[key])])

    _edit_json(file, dice, change)


def replace_document(file: Path, dice: random.Random) -> None:
    file.write_text(dice.choice(["{}", "[]", "null", "3", '"text"', "{", "NaN"]))


def nest_deeply(file: Path, dice: random.Random) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


JSON_FILE: tuple[Mutation, ...] = (drop_key, change_value, change_type, replace_document, nest_deeply)


def mutations_of(file: Path) -> tuple[Mutation, ...]:
    return ANY_FILE + JSON_FILE if file.suffix == ".json" else ANY_FILE


def restore(folder: Path, pristine: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(pristine, folder, symlinks=True)


def content(folder: Path) -> dict[str, Any]:
    """Return by path bytes, a link's target, or nothing for a folder; equal contents are no damage."""
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


@dataclass
class Tally:
    """Counts of an attack's outcomes; `attack` says in one line which damage is done to which file."""

    attack: str
    seed: int
    right: int = 0  # accepted, with the right result
    refused: int = 0  # with an error that names the file or field and the remedy
    silent: list[str] = field(default_factory=list)  # accepted, with another result
    lost: list[str] = field(default_factory=list)  # safe before, and now gone or held for ever
    unclear: list[str] = field(default_factory=list)  # an error that leaves the user alone

    @property
    def tried(self) -> int:
        return self.right + self.refused + len(self.silent) + len(self.lost) + len(self.unclear)

    def __str__(self) -> str:
        bad = [f"{name}: {each}" for name in ("silent", "lost", "unclear") for each in getattr(self, name)]
        counts = f"{len(self.silent)} silent, {len(self.lost)} lost, {len(self.unclear)} unclear"
        return "\n".join([f"{self.attack} (seed {self.seed}): {self.tried} tried, {counts}", *bad[:20]])

    def check(self, at_least: int) -> None:
        """Print the counts; fail unless so many were tried and none was silent, lost or unclear."""
        print(self)
        assert self.tried >= at_least, self
        assert self.tried == self.right + self.refused, self


def _edit_json(file: Path, dice: random.Random, edit: Callable[[Any, Any], None]) -> None:
    document = json.loads(file.read_bytes())
    places = [*_places(document)]
    if places:
        edit(*dice.choice(places))
    file.write_text(json.dumps(document))


def _places(document: Any) -> Any:
    """Return every (holder, key) in the document."""
    if not isinstance(document, dict | list):
        return
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield document, key
        yield from _places(value)


def _another(value: Any, dice: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + dice.choice([-1, 1, 10**9])
        case float():
            return value * 2 + 1
        case str():
            return value[::-1] + dice.choice(["x", "/../x", ""])
        case list():
            return value[1:] if value else [0]
        case dict():
            return {**value, "unknown": 0}
    return 0
