"""SHA-256 digests of files and of a module's weights."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn


def sha256(file: Path) -> str:
    """Return the digest of a file's contents, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def files_sha256(files: Iterable[Path], root: Path) -> str:
    """Return one digest of several files: their names below `root` and their contents. Costs one read."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
        digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest()


def weights_sha256(module: nn.Module) -> str:
    """Return the digest of a module's parameters and buffers: names, dtypes, shapes and bytes.

    Costs one copy to the host.
    """
    digest = hashlib.sha256()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
