"""The manifest of a checkpoint: its files as they were saved, in `manifest.json`."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hf_memopt.disk.digests import sha256

MANIFEST = "manifest.json"

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
    """Return a file's contents; None where it is no regular file: reading a pipe would take for ever."""
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def render(manifest: Manifest) -> bytes:
    """A manifest as it is written, with the digest of all the rest at its end."""
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
