"""The files of weights whose home is a file: the user's safetensors files as far as they hold them, and one of ours.

A weight counts as held by a file if the file has the same bytes: all of them compared, or mapped from there and never
written. Names and dtypes tell nothing: loaders rename weights, join them and cast them.
"""

import bisect
import itertools
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_memopt.transfer.direct_io import PAGE, private_pages
from hf_memopt.transfer.file_reader import PART_BYTES, BlockInFiles, Piece, ReadFile
from hf_memopt.transfer.scratch_file import DiskError, nameless_file, warn_of_file_system
from hf_memopt.units import format_bytes
from hf_memopt.weights.homes.packed_weights import PackedWeights, WeightSlice

logger = logging.getLogger(__name__)

# Longer headers are those of damaged files: the format's own limit.
_MAX_HEADER_BYTES = 100_000_000


def in_files(weights: PackedWeights, paths: Iterable[str | os.PathLike[str]] | None, folder: Path) -> BlockInFiles:
    """Return the block of packed weights as bytes in files.

    Args:
        weights: whose sources are still there.
        paths: safetensors files, or folders with some, that may hold weights. None: those from which the loader has
            mapped weights into memory, as transformers does where it casts nothing.
        folder: where a file is written, once, with the weights that no other file holds. It has no name, and is gone
            with the process.

    Raises:
        ValueError: a path leads to no safetensors file, or to one with a damaged header.
        DiskError: a file cannot be read or written.

    Costs a comparison of the weights with the files, but for those that are mapped from them, and one more read of the
    files that hold weights (see `ReadFile.remember`).
    """
    mapped = MappedMemory()
    held = _HeldTensors(_mapped_files(weights, mapped) if paths is None else _safetensors_files(paths), mapped)
    pieces: list[Piece] = []
    others: list[tuple[WeightSlice, Tensor]] = []
    for piece, memory in weights.pieces():
        place = held.take(piece, memory)
        if place is None:
            others.append((piece, memory))
        else:
            pieces.append(Piece(piece.start, memory.nbytes, *place))
    for file in dict.fromkeys(piece.file for piece in pieces):
        file.remember()
    if others:
        pieces += _written(others, folder)
    block = BlockInFiles(sorted(pieces, key=lambda piece: piece.start))
    names = ", ".join(file.name for file in block.files)
    logger.info("weights: %s in %s", format_bytes(sum(piece.num_bytes for piece in pieces)), names)
    return block


def loaded_from(model: nn.Module) -> list[Path] | None:
    """Return the folder that transformers has loaded a model from, if it holds safetensors files."""
    return folder_with_weights(getattr(getattr(model, "config", None), "_name_or_path", None))


def folder_with_weights(name: str | os.PathLike[str] | None) -> list[Path] | None:
    """Return a folder, for `in_files`, if it holds safetensors files, or None for anything else, such as a hub id."""
    return [Path(name)] if name and any(Path(name).glob("*.safetensors")) else None


_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +(/.*)$")


class MappedRange(NamedTuple):
    """Addresses [begin, end) that show the bytes of a file from `position` on.

    Attributes:
        identity: of the file: the numbers of its device and inode.
        is_written: whether some bytes differ from the file's, or may.
    """

    begin: int
    end: int
    position: int
    identity: tuple[int, int]
    path: Path
    is_written: bool


class MappedMemory:
    """The mapped memory of this process now; nothing elsewhere than on Linux."""

    def __init__(self) -> None:
        listing = Path("/proc/self/smaps")
        lines = os.fsdecode(listing.read_bytes()).split("\n") if listing.exists() else []
        self._ranges: list[MappedRange] = []
        is_file = False
        for line in lines:
            name, _, value = line.partition(":")
            if (head := _HEAD.match(line)) is not None:
                begin, end, position, major, minor = (int(head[number], 16) for number in range(1, 6))
                identity = os.makedev(major, minor), int(head[6])
                self._ranges.append(MappedRange(begin, end, position, identity, Path(head[7]), False))
                is_file = True
            elif "-" in name:
                is_file = False
            # Pages that were written are this process's own.
            elif is_file and name in ("Anonymous", "Swap") and value.split()[0] != "0":
                self._ranges[-1] = self._ranges[-1]._replace(is_written=True)

    def range_of(self, memory: Tensor) -> MappedRange | None:
        """Return the range that memory of the host lies in, or None for other memory."""
        if memory.device.type != "cpu":
            return None
        place = bisect.bisect_right(self._ranges, memory.data_ptr(), key=lambda each: each.begin) - 1
        found = self._ranges[place] if place >= 0 else None
        return found if found is not None and memory.data_ptr() + memory.nbytes <= found.end else None

    def shows(self, memory: Tensor, identity: tuple[int, int], position: int) -> bool:
        """Return whether memory shows a file's bytes from `position` on, and has never been written."""
        found = self.range_of(memory)
        return (
            found is not None
            and not found.is_written
            and found.identity == identity
            and memory.data_ptr() - found.begin + found.position == position
        )


class _HeldTensors:
    """The tensors in safetensors files, found by their bytes. Each is taken once, so that no two weights seem tied."""

    def __init__(self, paths: Iterable[Path], mapped: MappedMemory) -> None:
        self._mapped = mapped
        # By length and first page, in which most tensors differ.
        self._places: dict[tuple[int, bytes], list[tuple[ReadFile, int]]] = defaultdict(list)
        self._pages = private_pages(PART_BYTES)
        for path in paths:
            file, ranges = _opened(path)
            for begin, end in ranges:
                first = file.read(begin, min(PAGE, end - begin), self._pages)
                self._places[end - begin, first.numpy().tobytes()].append((file, begin))

    def take(self, piece: WeightSlice, memory: Tensor) -> tuple[ReadFile, int] | None:
        """Return file and position of a piece's bytes, or None where no file has them at a place that can be mapped."""
        places = self._places.get((memory.nbytes, memory[:PAGE].cpu().numpy().tobytes()), [])
        for number, (file, position) in enumerate(places):
            aligned = all((each.start - piece.start + position) % each.tensor.itemsize == 0 for each in piece.offsets)
            if aligned and self._is_equal(file, position, memory):
                return places.pop(number)
        return None

    def _is_equal(self, file: ReadFile, position: int, memory: Tensor) -> bool:
        if self._mapped.shows(memory, file.identity, position):
            return True
        step = PART_BYTES - PAGE
        starts = range(position, position + memory.nbytes, step)
        return all(
            torch.equal(file.read(start, part.nbytes, self._pages), part.cpu())
            for start, part in zip(starts, torch.split(memory, step), strict=True)
        )


def _safetensors_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.safetensors")) if os.path.isdir(path) else [path]
        if not inside:
            raise ValueError(f"files: {path} is no folder of safetensors files; name the checkpoint's")
        found += inside
    return found


def _mapped_files(weights: PackedWeights, mapped: MappedMemory) -> list[Path]:
    """Return the safetensors files that weights are mapped from."""
    ranges = [mapped.range_of(memory) for _, memory in weights.pieces()]
    found = dict.fromkeys(each.path for each in ranges if each is not None)
    return [path for path in found if _is_safetensors(path)]


def _is_safetensors(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length <= min(_MAX_HEADER_BYTES, path.stat().st_size) and file.read(1) == b"{"


def _opened(path: Path) -> tuple[ReadFile, list[tuple[int, int]]]:
    """Open a safetensors file; returns where in it each tensor begins and ends, too, without those that are empty."""
    try:
        if not path.is_file():  # a pipe would wait for its writer
            raise ValueError("it is no file")
        with path.open("rb") as file:
            ranges = _ranges(file)
        return ReadFile(path.open("rb", buffering=0), str(path)), ranges
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"files: {path} is no safetensors file, or a damaged one: {error}; name the checkpoint's, or copy it again"
        ) from error
    except OSError as error:
        raise DiskError(error.errno, f"{path}: cannot be opened: {error.strerror}; let this process read it") from error


def _ranges(file: BufferedReader) -> list[tuple[int, int]]:
    length = int.from_bytes(file.read(8), "little")
    begin, end = 8 + length, os.fstat(file.fileno()).st_size
    if length > _MAX_HEADER_BYTES or begin > end:
        raise ValueError(f"of {end} bytes, its header would take {length}")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    ranges = []
    for name, tensor in header.items():
        match tensor:
            case {"data_offsets": [int(first), int(last)]} if 0 <= first <= last <= end - begin:
                ranges.append((begin + first, begin + last))
            case _:
                raise ValueError(f"its header places the tensor {name!r} nowhere in the {end - begin} bytes of data")
    return [(first, last) for first, last in ranges if first < last]


def _written(others: Sequence[tuple[WeightSlice, Tensor]], folder: Path) -> list[Piece]:
    """Write weights to a file, one behind the other and aligned as in their block; returns their places."""
    num_bytes = sum(piece.num_bytes for piece, _ in others)
    positions = itertools.accumulate((piece.num_bytes for piece, _ in others), initial=0)
    places = list(zip(others, positions, strict=False))
    warn_of_file_system(folder)
    try:
        file = nameless_file(folder)
        with ExitStack() as stack:
            stack.callback(file.close)
            os.ftruncate(file.fileno(), num_bytes)
            for (_, memory), position in places:
                _write(file.fileno(), memory, position)
            os.fsync(file.fileno())
            stack.pop_all()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        raise DiskError(
            error.errno,
            f"disk={folder}: writing {format_bytes(num_bytes)} of weights failed: {reason}; free space there or name "
            "another folder",
        ) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ours = ReadFile(file, f"a file without a name in {folder}")
    return [Piece(piece.start, memory.nbytes, ours, position) for (piece, memory), position in places]


def _write(file: int, memory: Tensor, position: int) -> None:
    for part in torch.split(memory, PART_BYTES):
        rest = memoryview(part.cpu().numpy())
        while rest:
            written = os.pwrite(file, rest, position)
            position, rest = position + written, rest[written:]
