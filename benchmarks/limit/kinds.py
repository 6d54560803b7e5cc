"""Kinds of training in little memory that the benchmark compares; each one changes a workload before its first step."""

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.limit.workloads import Workload
from hf_memopt import ActivationOffloader, SyncCopier

THRESHOLD_MB = 0.25
UNLIMITED_GIB = 1024.0
# Fields of the offloader's stats that results have.
COUNTED = (
    "bytes_moved",
    "bytes_recomputed",
    "disk_bytes_written",
    "disk_bytes_live",
    "stall_ms",
    "predicted_peak_gib",
    "measured_peak_gib",
)


@dataclass(frozen=True)
class Handling:
    """One kind, ready to train."""

    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around a forward pass
    stats: Callable[[], dict[str, float | None]] = dict  # counts of this library's offloader


def checkpointing(workload: Workload, folder: Path, budget_gib: float) -> Handling:
    """Checkpoint each block by torch's function, whose variant without reentering autograd it recommends."""
    for block in workload.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return Handling()


class SharedMappings(SyncCopier):
    """A copier into shared mappings of files, which the system writes to disk and reads again by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._numbers = folder, itertools.count()

    def empty_host(self, num_bytes: int) -> Tensor:
        file = self._folder / f"mapping_{next(self._numbers)}"
        mapping = torch.from_file(str(file), shared=True, size=max(1, num_bytes), dtype=torch.uint8)
        file.unlink()
        return mapping[:num_bytes]

    def empty_like(self, tensor: Tensor) -> Tensor:
        return self.empty_host(tensor.nbytes).view(tensor.dtype).view_as(tensor)


def mapped_weights(workload: Workload, folder: Path, budget_gib: float) -> Handling:
    """Put the weights into shared mappings; private ones would become anonymous memory at the first update."""
    mappings = SharedMappings(folder)
    for weight in workload.model.parameters():
        weight.data = mappings.empty_like(weight).copy_(weight.data)
    return Handling()


def shared_mapping(workload: Workload, folder: Path, budget_gib: float) -> Handling:
    return _offloaded(workload, mode="all", copier=SharedMappings(folder), host_budget_gib=UNLIMITED_GIB)


def _offloaded(workload: Workload, **options: Any) -> Handling:
    offloader = ActivationOffloader(offload_threshold_mb=THRESHOLD_MB, **options)

    def stats() -> dict[str, float | None]:
        return {name: getattr(offloader.stats, name) for name in COUNTED}

    return Handling(lambda: offloader.offload_context(workload.model), stats)


NO_LIMIT = "plain, no limit"
KINDS: dict[str, Callable[[Workload, Path, float], Handling]] = {
    NO_LIMIT: lambda workload, folder, budget_gib: Handling(),
    "plain": lambda workload, folder, budget_gib: Handling(),
    "plain, weights mapped": mapped_weights,
    "checkpointing": checkpointing,
    "shared mapping": shared_mapping,
    "ours, budget": lambda workload, folder, budget_gib: _offloaded(workload, budget_gib=budget_gib, disk=folder),
    "ours, all": lambda workload, folder, budget_gib: _offloaded(workload, mode="all", disk=folder),
}
