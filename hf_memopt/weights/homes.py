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
        views: by slice, the weights between visits, to be read right after a `check`.
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

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        """Look rows of a table up, on the CPU.

        Args:
            slice_number: of the slice with the table.
            place: of the table among the slice's tensors; `(num_rows, ...)`.
            indices: int32 or int64, on the CPU, of any shape.

        Returns:
            Tensor: the rows in host memory, `(*indices.shape, ...)`, bitwise those of `table[indices]`.

        Raises:
            IndexError: an index is negative or too large, as `F.embedding` says it.
            DiskError: as for `check`.
        """

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

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        return looked_up(self.views[slice_number][place], indices)

    def check(self) -> None:
        """Do nothing: the memory is this process's own."""

    def _views(self, block: Tensor) -> list[list[Tensor]]:
        return [views(piece.offsets, block) for piece in self._weights.slices]


class FileHome:
    """A block in files. Between visits weights are mapped: the system reads pages that are touched, and may drop them.

    Mapped weights cannot be written. On the CPU they are read in place, too. To read them where a file has become
    shorter ends the process, so that each reader calls `check` right before.

    Args:
        weights: the weights.
        block: their bytes in files.
        copier: between host and device; None where the device computes in host memory.
    """

    def __init__(self, weights: PackedWeights, block: BlockInFiles, copier: Copier | None) -> None:
        self.num_bytes = weights.num_bytes
        self._slices, self._block = weights.slices, block
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

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        """Read rows through the page cache, some 3 microseconds for each index that is there.

        Of a table whose rows are not contiguous, the whole slice is read.
        """
        piece, table = self._slices[slice_number], self.views[slice_number][place]
        found, offset = self._block.pieces[piece.start], piece.offsets[place]
        looked_up(torch.empty(1).expand(len(table)), indices)  # raises where an index is wrong
        if not table[0].is_contiguous():
            memory = torch.empty(piece.num_bytes, dtype=torch.uint8)
            found.file.gather([(found.position, found.num_bytes)], memory)
            (whole,) = views([offset._replace(start=offset.start - piece.start)], memory)
            return looked_up(whole, indices)
        rows = torch.empty((*indices.shape, *table.shape[1:]), dtype=table.dtype)
        start, step = found.position + offset.start - piece.start, table.stride(0) * table.itemsize
        num_bytes = table[0].nbytes
        ranges = ((start + index * step, num_bytes) for index in indices.flatten().tolist())
        found.file.gather(ranges, rows.view(-1).view(torch.uint8))
        return rows

    def check(self) -> None:
        """Raise DiskError if a file has changed, or become shorter, and in a fork; 3 microseconds for each file."""
        self._block.check()


class PageCopier(SyncCopier):
    """A copier of the CPU whose device memory goes back to the system as soon as nothing uses it."""

    def empty_device(self, num_bytes: int) -> Tensor:
        return private_pages(num_bytes) if num_bytes else super().empty_device(0)


def looked_up(table: Tensor, indices: Tensor) -> Tensor:
    """Return rows of `table`, `(num_rows, ...)`, as `(*indices.shape, ...)`; an IndexError, as `F.embedding` has it."""
    return table.index_select(0, indices.flatten()).view((*indices.shape, *table.shape[1:]))


def _mapped(piece: WeightSlice, block: BlockInFiles) -> list[Tensor]:
    found = block.pieces[piece.start]
    ahead = found.position - piece.start
    file = found.file.mapped()
    # A view of another dtype needs a multiple of its size.
    whole = file[: file.nbytes // 16 * 16]
    return views([each._replace(start=each.start + ahead) for each in piece.offsets], whole)
