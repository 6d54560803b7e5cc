"""The homes of packed weights: where they are between visits, and from where they come."""

import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, distributed

from hf_memopt.memory.ranks import gather_from_ranks, num_ranks
from hf_memopt.transfer import Copier, SyncCopier, Transfer
from hf_memopt.transfer.backends import backend_of, readable_in_place
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.file_reader import BlockInFiles, DirectReads, StagedReads
from hf_memopt.transfer.host_memory import Pages, pinned_pages
from hf_memopt.transfer.lower_memory import Place
from hf_memopt.transfer.storage_memory import ResizedMemory, StorageMemory, WholePages
from hf_memopt.weights.homes.block_home import BlockHome
from hf_memopt.weights.homes.packed_weights import PackedWeights, WeightSlice, views
from hf_memopt.weights.homes.weight_files import in_files

Home = Literal["host", "file"]
HOMES: tuple[str, ...] = get_args(Home)
# A product of matrices may round otherwise where a weight lies otherwise to this many bytes, as MKL documents.
_VECTOR_BYTES = 64


class WeightsHome(ABC):
    """The place of a `PackedWeights` block; without overrides, one in memory that needs no care.

    Attributes:
        num_bytes: of the block.
        host_bytes: host memory that it takes.
        views: by slice, the weights between visits, to be read right after a `check`.
        file_bytes: of the block, where it lies in files.
        bytes_read: from files so far, without rows of tables.
        waited_s: seconds for which the host has waited for reads.
    """

    num_bytes: int
    host_bytes: int
    file_bytes = 0
    _views: list[list[Tensor]]

    @property
    def views(self) -> list[list[Tensor]]:
        return self._views

    @property
    def bytes_read(self) -> int:
        return 0

    @property
    def waited_s(self) -> float:
        return 0.0

    @abstractmethod
    def to_device(self, start: int, destination: Tensor) -> Transfer:
        """Start copying the bytes of the block from `start` on to device memory, `(num_bytes,)` uint8."""

    @abstractmethod
    def to_home(self, start: int, source: Tensor) -> Transfer:
        """Start writing the slice that begins at `start` of the block home from device memory, `(num_bytes,)` uint8."""

    def reserve(self, device: torch.device) -> None:  # noqa: B027
        """Take the space for all slices to be written; an error if there is none."""

    def memory(self, piece: WeightSlice, device: torch.device, message: str) -> StorageMemory:
        """Return memory of the device for a slice, which comes and goes; see `AccessGuard` for the message."""
        return ResizedMemory(piece.num_bytes, device, message)

    @abstractmethod
    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        """Look rows of a table up.

        Args:
            slice_number: of the slice with the table.
            place: of the table among the slice's tensors; `(num_rows, ...)`.
            indices: int32 or int64, of any shape; where they are not on the CPU, the host waits for them.

        Returns:
            Tensor: the rows, `(*indices.shape, ...)`, on the device of the indices; bitwise those of `table[indices]`.

        Raises:
            IndexError: an index is negative or too large, as `F.embedding` says it.
            DiskError: as for `check`.
        """

    def check(self) -> None:  # noqa: B027
        """Raise an error if the block has changed."""

    def settle(self) -> None:  # noqa: B027
        """Wait on the host for all copies, those too that an interrupt has cut off from their callers."""

    def trim(self) -> None:  # noqa: B027
        """Give memory that storages have dropped back to the system."""


def make_home(
    weights: PackedWeights,
    home: str,
    device: torch.device,
    copier: Copier,
    files: Iterable[str | os.PathLike[str]] | None,
    disk: str | os.PathLike[str] | None,
    written: BlockHome | None = None,
) -> WeightsHome:
    """Copy weights to host memory, or find them in files.

    Packed weights still have their sources. `files` are those of `in_files`, and `disk` is a folder for the weights
    that none of them holds; None, the system's for temporary files. `written` is where slices of files go that are
    written, None where none is.

    Raises:
        ValueError: ranks have different weights, or a path leads to no safetensors file.
        DiskError: a file cannot be read or written.
    """
    simulated = backend_of(device).home_in_files
    if home == "file" and simulated is not None:
        made: WeightsHome = simulated(weights, device, copier, written)
        return made
    are_several = several_ranks() and weights.num_bytes > 0
    if home == "file":
        if are_several:
            refuse_different(weights)
        block = in_files(weights, files, Path(tempfile.gettempdir() if disk is None else disk))
        copier_between = None if device.type == "cpu" and type(copier) is SyncCopier else copier
        return FileHome(weights, block, copier_between, written)
    if are_several:
        return HostHome(weights, share(weights, device), copier)
    master = copier.empty_host(weights.num_bytes)
    weights.pack(master)
    return HostHome(weights, master, copier)


class HostHome(WeightsHome):
    """A block in host memory, `master`; shared with other ranks, it is not written again."""

    def __init__(self, weights: PackedWeights, master: Tensor, copier: Copier) -> None:
        self.num_bytes = self.host_bytes = master.nbytes
        self._weights, self._master, self._copier = weights, master, copier
        self._views = [views(piece.offsets, master) for piece in weights.slices]

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        return self._copier.to_device(self._master[start : start + destination.nbytes], destination)

    def to_home(self, start: int, source: Tensor) -> Transfer:
        return self._copier.to_host(source, self._master[start : start + source.nbytes])

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        """Look them up on the device where it can read host memory in place; then nobody waits."""
        try:
            block = readable_in_place(self._master, indices.device)
        except ValueError:
            return looked_up(self.views[slice_number][place], indices.cpu()).to(indices.device)
        (table,) = views([self._weights.slices[slice_number].offsets[place]], block)
        return looked_up(table, indices)

    def settle(self) -> None:
        self._copier.settle()


class HomeInFiles(WeightsHome):
    """A block in files that are never written: a slice that updates write has another place from then on.

    Args:
        written: home of slices that are written; None where none is.
    """

    def __init__(self, weights: PackedWeights, written: BlockHome | None) -> None:
        self.num_bytes = self.file_bytes = weights.num_bytes
        self._slices, self._home_of_written = weights.slices, written
        # By the first bytes of slices: their numbers, the places of those that may be written, and those that were.
        self._numbers = {piece.start: number for number, piece in enumerate(weights.slices)}
        self._places: dict[int, Place] = {}
        self._written: set[int] = set()

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        if start not in self._written:
            return self._read(start, destination)
        memory, block = self._places[start]
        return memory.read(block, destination)

    def to_home(self, start: int, source: Tensor) -> Transfer:
        memory, block = self._place(start, source.device)
        transfer = memory.write(source, block)
        self._written.add(start)
        return transfer

    def reserve(self, device: torch.device) -> None:
        for start in self._numbers:
            self._place(start, device)

    def _place(self, start: int, device: torch.device) -> Place:
        if start not in self._places:
            assert self._home_of_written is not None
            num_bytes = self._slices[self._numbers[start]].num_bytes
            self._places[start] = self._home_of_written.place(device, num_bytes)
        return self._places[start]

    @abstractmethod
    def _read(self, start: int, destination: Tensor) -> Transfer:
        """Start reading bytes that were not written."""


class FileHome(HomeInFiles):
    """A block in files. Between visits weights are mapped: the system reads pages that are touched, and may drop them.

    To read mapped weights where a file has become shorter ends the process, so that each reader calls `check` right
    before.

    Args:
        copier: between host and device; None where the device computes in host memory.
    """

    def __init__(
        self, weights: PackedWeights, block: BlockInFiles, copier: Copier | None, written: BlockHome | None = None
    ) -> None:
        super().__init__(weights, written)
        self._block = block
        self._reads = DirectReads(block) if copier is None else StagedReads(block, copier)
        self.host_bytes = self._reads.host_bytes
        self._views = [_mapped(piece, block) for piece in weights.slices]
        self._bytes_read_back = 0
        # By their first bytes, written slices that `views` shows where they were written, and those written since.
        self._is_shown: set[int] = set()
        self._is_newer: set[int] = set()

    @property
    def bytes_read(self) -> int:
        return self._block.bytes_read + self._bytes_read_back

    @property
    def waited_s(self) -> float:
        file = self._home_of_written and self._home_of_written.file
        return self._block.waited_s + (file.waited_s if file else 0.0)

    @property
    def views(self) -> list[list[Tensor]]:
        for start in tuple(self._is_newer):
            memory, block = self._places[start]
            shown = memory.at_home(block)  # waits for the last write
            if start not in self._is_shown:
                number = self._numbers[start]
                piece = self._slices[number]
                whole = torch.frombuffer(shown, dtype=torch.uint8)[block.offset :][: piece.num_bytes]
                self._views[number] = views([each._replace(start=each.start - start) for each in piece.offsets], whole)
                self._is_shown.add(start)
            self._is_newer.discard(start)
        return self._views

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        if start in self._written:
            self._bytes_read_back += destination.nbytes
        return super().to_device(start, destination)

    def _read(self, start: int, destination: Tensor) -> Transfer:
        return self._reads.read(start, destination)

    def to_home(self, start: int, source: Tensor) -> Transfer:
        transfer = super().to_home(start, source)
        self._is_newer.add(start)
        return transfer

    def memory(self, piece: WeightSlice, device: torch.device, message: str) -> StorageMemory:
        ahead = self._block.pieces[piece.start].position - piece.start
        is_aligned = all((each.start + ahead - each.tensor.data_ptr()) % _VECTOR_BYTES == 0 for each in piece.offsets)
        if isinstance(self._reads, DirectReads) and WholePages.are_available():
            if is_aligned:
                self.host_bytes = 0  # no read passes through other memory
                return self._reads.memory(piece.start, piece.num_bytes, message)
            if self._home_of_written is not None:
                first = piece.offsets[0]
                offset = (first.tensor.data_ptr() - first.start + piece.start) % PAGE
                return WholePages(piece.num_bytes, offset, message, self._reads.spare)
        return super().memory(piece, device, message)

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        """Read rows through the page cache, some 3 microseconds for each index that is there.

        Of a table whose rows are not contiguous, the whole slice is read.
        """
        device, indices = indices.device, indices.cpu()
        piece, table = self._slices[slice_number], self.views[slice_number][place]
        if piece.start in self._written:
            return looked_up(table, indices).to(device)
        found, offset = self._block.pieces[piece.start], piece.offsets[place]
        looked_up(torch.empty(1, device="cpu").expand(len(table)), indices)  # raises where an index is wrong
        if not table[0].is_contiguous():
            memory = torch.empty(piece.num_bytes, dtype=torch.uint8, device="cpu")
            found.file.gather([(found.position, found.num_bytes)], memory)
            (whole,) = views([offset._replace(start=offset.start - piece.start)], memory)
            return looked_up(whole, indices).to(device)
        rows = torch.empty((*indices.shape, *table.shape[1:]), dtype=table.dtype, device="cpu")
        start, step = found.position + offset.start - piece.start, table.stride(0) * table.itemsize
        num_bytes = table[0].nbytes
        ranges = ((start + index * step, num_bytes) for index in indices.flatten().tolist())
        found.file.gather(ranges, rows.view(-1).view(torch.uint8))
        return rows.to(device)

    def check(self) -> None:
        """Raise DiskError if a file has changed, or become shorter, and in a fork; 3 microseconds for each file."""
        self._block.check()

    def settle(self) -> None:
        self._reads.settle()
        if self._home_of_written is not None:
            self._home_of_written.settle()

    def trim(self) -> None:
        if isinstance(self._reads, DirectReads):
            self._reads.spare.free()


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
