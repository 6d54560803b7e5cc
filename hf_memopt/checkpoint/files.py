"""Checkpoint folders on disk: written whole or not at all, and checked against their manifest before they are read.

A run's folder holds `step-000120/`, with `manifest.json` in each, and `latest`, three lines: the name of the newest
checkpoint, the sha256 of its manifest, and the run's id, which is in the manifests too. Names that end in `.partial` or
`.removed` are left by an interrupted save.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from hf_memopt.disk.files_on_disk import not_written, put_in_place, sha256, sync

MANIFEST = "manifest.json"
LATEST = "latest"
_UNFINISHED = ("*.partial", "*.removed")

Manifest = dict[str, Any]


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"step-[0-9]{6,}", name) is not None


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the contents of `manifest.json`; ValueError if there is none, it is damaged, or it is another folder's."""
    if checkpoint.is_symlink():
        raise ValueError("it is a symbolic link; name the folder that it leads to")
    file = checkpoint / MANIFEST
    written = read_regular(file)
    if written is None:
        raise ValueError(f"{MANIFEST} is missing from {checkpoint}")
    try:
        manifest: Manifest = json.loads(written)
        manifest.pop("sha256")
        unchanged = render(manifest) == written
        name = checkpoint_name(manifest["step"])
        _check_fields(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not unchanged:
        raise ValueError(f"{file} was changed after it had been written")
    if is_checkpoint_name(checkpoint.name) and checkpoint.name != name:
        raise ValueError(f"{file} is that of {name}: another checkpoint has been put into this folder")
    return manifest


def _check_fields(manifest: Manifest) -> None:
    # A digest shows that nothing was changed; it does not show that this was written here.
    for name, kind in (("run", str), ("position", dict), ("launch", dict), ("files", dict)):
        if not isinstance(manifest[name], kind):
            raise TypeError(f"{name} is not of type {kind.__name__}")
    for name, entry in manifest["files"].items():
        if not (
            isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        ):
            raise TypeError(f"files: {name} lacks its bytes or its sha256")


def verify_files(checkpoint: Path) -> Manifest:
    """Read all files, and return the manifest; ValueError for the first fault."""
    manifest = read_manifest(checkpoint)
    listed = manifest["files"]
    found = {file.relative_to(checkpoint).as_posix() for file in files_below(checkpoint)} - {MANIFEST}
    for name in sorted(found | listed.keys()):
        if name not in found:
            raise ValueError(f"{name} is missing")
        if name not in listed:
            raise ValueError(f"{name} is not part of it; remove that file")
        try:
            _compare(checkpoint / name, listed[name])
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    return manifest


def list_files(checkpoint: Path) -> Manifest:
    return {
        file.relative_to(checkpoint).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in files_below(checkpoint)
    }


def files_below(folder: Path) -> list[Path]:
    """Return everything but folders: links and pipes too."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def read_regular(file: Path) -> bytes | None:
    """Return a file's contents, or None where it is not a regular file: reading a pipe would never end."""
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def render(manifest: Manifest) -> bytes:
    """The text of a manifest, which ends with the digest of all that precedes it."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1) + "\n").encode()


def _compare(file: Path, entry: dict[str, Any]) -> None:
    num_bytes = file.stat().st_size
    if not file.is_file():  # reading a pipe would take for ever
        raise ValueError(f"{file.name} is not a regular file")
    if num_bytes != entry["bytes"]:
        raise ValueError(f"{file.name} has {num_bytes} bytes instead of {entry['bytes']}")
    if sha256(file) != entry["sha256"]:
        raise ValueError(f"{file.name} differs from what was saved (sha256)")


class Pointer(NamedTuple):
    """The contents of `latest`: a checkpoint's name, the sha256 of its manifest, and the run that saved it."""

    name: str
    sha256: str
    run: str


def find_checkpoint(folder: Path, name: str | Path) -> Path:
    """Return the folder of `name`: "latest", a path, or the name of a checkpoint in `folder`. Reads no states.

    Raises:
        ValueError: there is none, `latest` cannot be read, or `folder` holds checkpoints and this is none of them.
    """
    if str(name) == LATEST:
        latest = read_latest(folder)
        if latest is None:
            raise ValueError(f"checkpoint 'latest': {folder} has no file of that name; {_remedy(folder)}")
        return folder / latest.name
    found = _existing(folder, name)
    latest = _pointer(folder)
    if latest is not None and not is_own(folder, found):
        raise ValueError(
            f"checkpoint {found} is none of those in {folder}, which holds {latest.name}, and a folder is for one run; "
            f"resume from {latest.name}, or choose another folder"
        )
    return found


def is_own(folder: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is one that runs in `folder` save and remove."""
    return is_checkpoint_name(checkpoint.name) and checkpoint.parent.resolve() == folder.resolve()


def read_latest(folder: Path) -> Pointer | None:
    """Return the contents of `latest`, or None where there is no such file. ValueError if it is damaged."""
    pointer = _pointer(folder)
    if pointer is None and os.path.lexists(folder / LATEST):
        raise ValueError(f"{folder / LATEST} is damaged: it should name a checkpoint; {_remedy(folder)}")
    return pointer


def verified(folder: Path, name: str | Path) -> tuple[Path, Manifest]:
    """Return a checkpoint and its manifest, after reading all files; ValueError if it is not as it was saved."""
    found = find_checkpoint(folder, name)
    try:
        manifest = _intact(found)
        if str(name) == LATEST and _pointer(folder) != _pointer_to(found):
            raise ValueError(f"{found / MANIFEST} is not the one that {folder / LATEST} was written with")
    except ValueError as error:
        raise ValueError(f"checkpoint {found} is not what was saved: {error}; {_remedy(folder)}") from error
    return found, manifest


def draft_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.partial")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn failures to write inside into an OSError that names `target`, and the bytes free and needed."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        sizes = (sum(file.lstat().st_size for file in files_below(path)) for path in target.parent.glob("step-*"))
        needed = max(sizes, default=0)
        advice = (
            f", and a checkpoint takes {needed:,} or more. Make room, or mend the permissions; what '{LATEST}' named "
            "is still there"
        )
        raise not_written(target, error, advice, needed) from error


def begin(draft: Path) -> None:
    """Make an empty folder for a checkpoint, and remove leftovers of interrupted saves beside it.

    Needs the folder's lock: another process's draft would be taken for a leftover.
    """
    folder = draft.parent
    for pattern in _UNFINISHED:
        for left in folder.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    draft.mkdir()


def sync_files(folder: Path) -> None:
    for file in files_below(folder):
        sync(file)


def publish(draft: Path, header: Manifest, checkpoint: Path) -> None:
    """Give a draft, whose files are on disk, its manifest and its name, and make it `latest`.

    A checkpoint of that name, which `latest` must not name, is replaced.
    """
    mode = draft.stat().st_mode & 0o666  # that the umask gives; safetensors writes files with mode 600
    for file in files_below(draft):
        if file.stat().st_mode & 0o777 != mode:
            file.chmod(mode)
    manifest = draft / MANIFEST
    manifest.write_bytes(render({**header, "files": list_files(draft)}))
    sync(manifest)
    for subfolder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        sync(subfolder)
    remove([checkpoint] if checkpoint.exists() else [])
    draft.rename(checkpoint)
    sync(checkpoint.parent)
    point_latest_to(checkpoint)


def point_latest_to(checkpoint: Path) -> None:
    """Point `latest` at this checkpoint; it always names the former one or this one. Writes nothing if it does."""
    folder = checkpoint.parent
    pointer = _pointer_to(checkpoint)
    if _pointer(folder) == pointer:
        return
    draft = folder / f"{LATEST}.partial"
    draft.write_text("".join(f"{line}\n" for line in pointer))
    put_in_place(draft, folder / LATEST)


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


def _existing(folder: Path, name: str | Path) -> Path:
    try:
        for candidate in (Path(name), folder / name):
            if candidate.is_dir():
                return candidate
    except OSError as error:
        raise ValueError(f"checkpoint {str(name)!r} cannot be read: {error.strerror}; {_remedy(folder)}") from error
    raise ValueError(f"checkpoint {str(name)!r}: no such folder, and none in {folder}; {_remedy(folder)}")


def _pointer(folder: Path) -> Pointer | None:
    """Return the contents of `latest`, None where it says nothing; ValueError if no file can be read or put there."""
    if (folder / LATEST).is_dir():
        raise ValueError(f"{folder / LATEST} is a folder instead of a file; remove it, or choose another folder")
    content = read_regular(folder / LATEST)
    match = re.fullmatch(rb"(step-[0-9]{6,})\n([0-9a-f]{64})\n([0-9a-f]{32})\n", content or b"")
    return None if match is None else Pointer(*(part.decode() for part in match.groups()))


def _pointer_to(checkpoint: Path) -> Pointer:
    return Pointer(checkpoint.name, sha256(checkpoint / MANIFEST), read_manifest(checkpoint)["run"])


def _steps(folder: Path) -> list[tuple[int, Path]]:
    paths = [path for path in folder.glob("step-*") if is_checkpoint_name(path.name) and path.is_dir()]
    return sorted((int(path.name.removeprefix("step-")), path) for path in paths)


def _remedy(folder: Path) -> str:
    valid = []
    for _, path in _steps(folder):
        with suppress(ValueError):
            _intact(path)
            valid.append(path.name)
    if not valid:
        return f"there is no valid checkpoint in {folder}: start anew, or restore one from a copy"
    return f"valid in {folder}: {', '.join(valid)}. Resume from one of them by its path, or restore a copy"


def _intact(checkpoint: Path) -> Manifest:
    """Return the manifest of an undamaged checkpoint of the run whose `latest` is beside it."""
    manifest = verify_files(checkpoint)
    latest = _pointer(checkpoint.parent)
    if latest is not None and manifest["run"] != latest.run:
        raise ValueError(f"another run than that of {latest.name} saved it; resume from it in a folder of its own")
    return manifest
