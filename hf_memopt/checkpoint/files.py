"""Checkpoint folders on disk: written whole or not at all, and found to be what was written before they are read.

A run's folder holds `step-000120/`, with `manifest.json` in each, and `latest`, two lines: the name of the newest
checkpoint and the sha256 of its manifest. Names that end in `.partial` or `.removed` are what an interrupted save left.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
LATEST = "latest"
_UNFINISHED = ("*.partial", "*.removed")

Manifest = dict[str, Any]


class Pointer(NamedTuple):
    """What `latest` says: a checkpoint's name, and the sha256 of its manifest."""

    name: str
    sha256: str


def checkpoint_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:06d}"


def find_checkpoint(folder: Path, name: str | Path) -> Path:
    """The folder that `name` stands for: "latest", a path, or the name of a checkpoint in `folder`. Reads no states.

    Raises:
        ValueError: there is none, or `latest` cannot be read.
    """
    if str(name) == LATEST:
        pointer = read_latest(folder)
        if pointer is None:
            raise ValueError(f"checkpoint 'latest': {folder} has no file of that name; {_remedy(folder)}")
        return folder / pointer.name
    for candidate in (Path(name), folder / name):
        if candidate.is_dir():
            return candidate
    raise ValueError(f"checkpoint {str(name)!r}: no such folder, and none in {folder}; {_remedy(folder)}")


def read_latest(folder: Path) -> Pointer | None:
    """What `latest` says; None where there is no such file.

    Raises:
        ValueError: it is not what was written.
    """
    file = folder / LATEST
    if not file.is_file():
        return None
    match = re.fullmatch(rb"(step-[0-9]{6,})\n([0-9a-f]{64})\n", file.read_bytes())
    if match is None:
        raise ValueError(f"{file} is damaged: it should name a checkpoint; {_remedy(folder)}")
    return Pointer(*(part.decode() for part in match.groups()))


def verified(folder: Path, name: str | Path) -> tuple[Path, Manifest]:
    """The checkpoint that `name` stands for and its manifest, after reading all of its files.

    Raises:
        ValueError: a file is missing, is not the checkpoint's, or differs from what was saved; it names the file, and
            valid checkpoints in `folder`.
    """
    found = find_checkpoint(folder, name)
    complaint = _complaint(found)
    if complaint is None and str(name) == LATEST:
        pointer = read_latest(folder)
        if pointer is None or pointer.sha256 != _sha256(found / MANIFEST):
            complaint = f"{found / MANIFEST} is not the one that {folder / LATEST} was written with"
    if complaint is not None:
        raise ValueError(f"checkpoint {found} is not what was saved: {complaint}; {_remedy(folder)}")
    return found, read_manifest(found)


def read_manifest(checkpoint: Path) -> Manifest:
    """What `manifest.json` says.

    Raises:
        ValueError: there is none, or it is not what was written.
    """
    file = checkpoint / MANIFEST
    if not file.is_file():
        raise ValueError(f"{MANIFEST} is missing from {checkpoint}")
    written = file.read_bytes()
    try:
        manifest = json.loads(written)
        manifest.pop("sha256")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if _render(manifest) != written:
        raise ValueError(f"{file} was changed after it had been written")
    return manifest  # type: ignore[no-any-return]


def draft_of(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return checkpoint.with_name(f"{checkpoint.name}.partial")


def begin(draft: Path) -> None:
    """Make an empty folder to write a checkpoint into, and remove what interrupted saves left beside it."""
    folder = draft.parent
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    for pattern in _UNFINISHED:
        for left in folder.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    draft.mkdir()


def sync_files(folder: Path) -> None:
    """Wait until the contents of all files below `folder` are on disk."""
    for file in _files(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(draft: Path, header: Manifest, checkpoint: Path) -> None:
    """Give a draft, whose files are on disk, its manifest and its name, and make it `latest`.

    A checkpoint of that name, which `latest` must not name, is replaced.
    """
    _set_modes(draft)
    sizes_and_hashes = {_relative(draft, file): _entry(file) for file in _files(draft)}
    _write(draft / MANIFEST, _render({**header, "files": sizes_and_hashes}))
    for subfolder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        sync_folder(subfolder)
    remove([checkpoint] if checkpoint.exists() else [])
    draft.rename(checkpoint)
    sync_folder(checkpoint.parent)
    point_latest_to(checkpoint)


def point_latest_to(checkpoint: Path) -> None:
    """Let `latest` name this checkpoint; it always names the former one or this one."""
    folder = checkpoint.parent
    draft = folder / f"{LATEST}.partial"
    _write(draft, f"{checkpoint.name}\n{_sha256(checkpoint / MANIFEST)}\n".encode())
    draft.replace(folder / LATEST)
    sync_folder(folder)


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete folders; none of them looks like a checkpoint while it is being deleted."""
    for checkpoint in checkpoints:
        unfinished = checkpoint.with_name(f"{checkpoint.name}.removed")
        checkpoint.rename(unfinished)
        shutil.rmtree(unfinished)


def older_than(folder: Path, step: int, keep_last: int) -> list[Path]:
    """Checkpoints in `folder` that are not among the last `keep_last` up to and including `step`."""
    upto = [path for number, path in _steps(folder) if number <= step]
    return upto[: max(0, len(upto) - keep_last)]


def _steps(folder: Path) -> list[tuple[int, Path]]:
    matches = [(re.fullmatch(r"step-([0-9]{6,})", path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _remedy(folder: Path) -> str:
    valid = [path.name for _, path in _steps(folder) if _complaint(path) is None]
    if not valid:
        return f"there is no valid checkpoint in {folder}: start anew, or restore one from a copy"
    return f"valid in {folder}: {', '.join(valid)}. Resume from one of them by its path, or restore a copy"


def _complaint(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None where it is what was saved."""
    try:
        listed = read_manifest(checkpoint)["files"]
    except ValueError as error:
        return str(error)
    found = {_relative(checkpoint, file) for file in _files(checkpoint)} - {MANIFEST}
    for name in sorted(found | listed.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is not part of it; remove that file"
        if (checkpoint / name).stat().st_size != listed[name]["bytes"]:
            return f"{name} has {(checkpoint / name).stat().st_size} bytes instead of {listed[name]['bytes']}"
        if _sha256(checkpoint / name) != listed[name]["sha256"]:
            return f"{name} differs from what was saved (sha256)"
    return None


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _render(manifest: Manifest) -> bytes:
    """A manifest as it is written, with the digest of all the rest at its end."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1) + "\n").encode()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def _relative(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _set_modes(draft: Path) -> None:
    """What the umask gives to new files, as the draft itself has it: safetensors writes files that only we can read."""
    mode = draft.stat().st_mode & 0o666
    for file in _files(draft):
        if file.stat().st_mode & 0o777 != mode:
            file.chmod(mode)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
