"""One host copy of a teacher's weights for all processes of a machine."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from hf_memopt.memory.ranks import gather_from_ranks, num_ranks
from hf_memopt.transfer.host_memory import Pages, pinned_pages
from hf_memopt.weights.homes.packed_weights import PackedWeights


class _Claim(NamedTuple):
    machine: str
    num_bytes: int
    fingerprint: str


def several_ranks() -> bool:
    return num_ranks() > 1 and hasattr(os, "memfd_create")


def share(weights: PackedWeights, device: torch.device) -> Tensor:
    """Pack the weights into memory that all ranks of a machine map, `(num_bytes,)` uint8, page-locked on CUDA.

    Every rank calls this, with the same weights, or all raise ValueError. The first rank of each machine writes the
    memory, and no rank writes it afterwards. It has no name in any file system: no limit of `/dev/shm` applies, and it
    is gone with the last process that maps it, however that ends.

    Costs a SHA-256 of the weights on each rank, and three small collectives.
    """
    claims = refuse_different(weights)
    rank = distributed.get_rank()
    first = min(other for other, claim in enumerate(claims) if claim.machine == claims[rank].machine)
    pages, file = None, -1
    if rank == first:
        file = os.memfd_create("hf_memopt-teacher")
        os.ftruncate(file, weights.num_bytes)
        pages = Pages(file, weights.num_bytes)
        weights.pack(torch.frombuffer(pages, dtype=torch.uint8))
    offers = gather_from_ranks(f"/proc/{os.getpid()}/fd/{file}")
    if pages is None:
        with Path(offers[first]).open("r+b") as shared:
            pages = Pages(shared.fileno(), weights.num_bytes)
    gather_from_ranks(None)  # the others have opened the file
    if file != -1:
        os.close(file)
    return pinned_pages(pages, device)


def refuse_different(weights: PackedWeights) -> list[_Claim]:
    """Return the claims of all ranks, after a ValueError on every one of them where their weights differ."""
    claims = gather_from_ranks(_Claim(_machine(), weights.num_bytes, _fingerprint(weights)))
    different = [rank for rank, claim in enumerate(claims) if claim[1:] != claims[0][1:]]
    if different:
        raise ValueError(
            f"frozen weights differ between rank 0 and ranks {different}: all ranks must load the same checkpoint, in "
            "the same dtype"
        )
    return claims


def _machine() -> str:
    """Return a key equal for processes that can open each other's files under /proc: one kernel, one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = Path("/proc/self/ns/pid").readlink()
    return f"{boot} {processes}"


def _fingerprint(weights: PackedWeights) -> str:
    digest = hashlib.sha256()
    for piece, memory in weights.pieces():
        layout = [(tensor.dtype, tensor.shape, stride, start) for tensor, start, stride in piece.offsets]
        digest.update(str(layout).encode())
        digest.update(memory.cpu().numpy())
    return digest.hexdigest()
