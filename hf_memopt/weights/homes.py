"""The homes of packed weights: where they are between visits, and from where they come."""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from hf_memopt.transfer import Copier, SyncCopier, Transfer
from hf_memopt.transfer.backends import readable_in_place
from hf_memopt.transfer.direct_io import private_pages
from hf_memopt.transfer.file_reader import BlockInFiles, DirectReads, StagedReads
from hf_memopt.transfer.storage_memory import ResizedMemory, StorageMemory, WholePages
from hf_memopt.weights.packed_weights import PackedWeights, WeightSlice, views

Home = Literal["host", "file"]
HOMES: tuple[str, ...] = get_args(Home)
# A product of matrices may round otherwise where a weight lies otherwise to this many bytes, as MKL documents.
_VECTOR_BYTES = 64


class WeightsHome(Protocol):
    """The place of a `PackedWeights` block. Nothing is ever written back to it.

    Attributes:
        num_bytes: of the block.
        host_bytes: host memory that it takes.
        views: by slice, the weights between visits.
    """

    num_bytes: int
    host_bytes: int
    views: list[list[Tensor]]

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        """Start copying the bytes of the block from `start` on to device memory, `(num_bytes,)` uint8."""

    def memory(self, piece: WeightSlice, device: torch.device) -> StorageMemory:
        """Return memory of the device for a slice, which comes and goes."""

    def in_place(self, device: torch.device) -> list[list[Tensor]] | None:
        """Return `views` as the device reads them without a copy; None where it cannot."""

    def check(self) -> None:
        """Raise an error if the block has changed."""


class HostHome:
    """A block in host memory, `master`, which nothing writes again."""

    def __init__(self, weights: PackedWeights, master: Tensor, copier: Copier) -> None:
        self.num_bytes = self.host_bytes = master.nbytes
        self._weights, self._master, self._copier = weights, master, copier
        self.views = self._views(master)

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        return self._copier.to_device(self._master[start : start + destination.nbytes], destination)

    def memory(self, piece: WeightSlice, device: torch.device) -> StorageMemory:
        return ResizedMemory(piece.num_bytes, device)

    def in_place(self, device: torch.device) -> list[list[Tensor]]:
        return self._views(readable_in_place(self._master, device))

    def check(self) -> None:
        """Do nothing: the memory is this process's own."""

    def _views(self, block: Tensor) -> list[list[Tensor]]:
        return [views(piece.offsets, block) for piece in self._weights.slices]


class FileHome:
    """A block in files. Between visits weights are mapped: the system reads pages that are touched, and may drop them.

    Mapped weights cannot be written. On the CPU they are read in place, too.

    Args:
        weights: the weights.
        block: their bytes in files.
        copier: between host and device; None where the device computes in host memory.
    """

    def __init__(self, weights: PackedWeights, block: BlockInFiles, copier: Copier | None) -> None:
        self.num_bytes = weights.num_bytes
        self._block = block
        self._reads = DirectReads(block) if copier is None else StagedReads(block, copier)
        self.host_bytes = self._reads.host_bytes
        self.views = [_mapped(piece, block) for piece in weights.slices]

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        return self._reads.read(start, destination)

    def memory(self, piece: WeightSlice, device: torch.device) -> StorageMemory:
        ahead = self._block.pieces[piece.start].position - piece.start
        is_aligned = all((each.start + ahead - each.tensor.data_ptr()) % _VECTOR_BYTES == 0 for each in piece.offsets)
        if isinstance(self._reads, DirectReads) and is_aligned and WholePages.are_available():
            self.host_bytes = 0  # no read passes through other memory
            return self._reads.memory(piece.start, piece.num_bytes)
        return ResizedMemory(piece.num_bytes, device)

    def in_place(self, device: torch.device) -> list[list[Tensor]] | None:
        return self.views if device.type == "cpu" else None

    def check(self) -> None:
        self._block.check()


class PageCopier(SyncCopier):
    """A copier of the CPU whose device memory goes back to the system as soon as nothing uses it."""

    def empty_device(self, num_bytes: int) -> Tensor:
        return private_pages(num_bytes) if num_bytes else super().empty_device(0)


def _mapped(piece: WeightSlice, block: BlockInFiles) -> list[Tensor]:
    found = block.pieces[piece.start]
    ahead = found.position - piece.start
    file = found.file.mapped()
    # A view of another dtype needs a multiple of its size.
    whole = file[: file.nbytes // 16 * 16]
    return views([each._replace(start=each.start + ahead) for each in piece.offsets], whole)
