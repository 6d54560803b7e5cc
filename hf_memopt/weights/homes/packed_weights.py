"""A frozen module's weights as one block of bytes, so that whole blocks are copied."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_memopt.weights.homes.quantised import inner_tensors

# Large enough for every dtype and for the vectorised loads of CUDA kernels.
ALIGNMENT_BYTES = 256


class OffsetTensor(NamedTuple):
    """A tensor and its place in a block: the byte where its first element lies, and its strides there."""

    tensor: Tensor
    start: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class WeightSlice:
    """A part of the block packed as one piece; overlapping tensors, such as tied ones, share a slice.

    Attributes:
        start: byte of the block, aligned.
        num_bytes: padding included.
        offsets: its tensors and their offsets in the block.
    """

    start: int
    num_bytes: int
    offsets: tuple[OffsetTensor, ...]


class PackedWeights:
    """Packs a module's parameters and buffers, persistent or not, in the order of registration, except `exclude`.

    Tensors that overlap in memory are packed, and later copied, once. Strides and offsets are kept. Raises ValueError
    for a tensor whose memory cannot be rebound.
    """

    def __init__(
        self,
        module: nn.Module,
        exclude: Iterable[Tensor] = (),
        inner_of: Callable[[str, Tensor], Iterator[Tensor]] = inner_tensors,
    ) -> None:
        excluded = {id(parameter) for parameter in exclude}
        named = [*module.named_parameters(), *module.named_buffers()]
        inner = {
            id(tensor): [each for each in inner_of(name, tensor) if each.numel()]
            for name, tensor in named
            if id(tensor) not in excluded
        }
        ranges = memory_ranges([tensor for tensors in inner.values() for tensor in tensors])
        self._sources = [each.memory for each in ranges]
        self.slices = packed(ranges)
        self.offsets = [each for piece in self.slices for each in piece.offsets]
        self.num_bytes = sum(piece.num_bytes for piece in self.slices)
        index = {id(tensor): i for i, piece in enumerate(self.slices) for tensor, *_ in piece.offsets}
        # By the id of a parameter, a buffer, or a tensor inside a quantised one.
        self.slices_of = {each: (number,) for each, number in index.items()} | {
            weight: tuple(dict.fromkeys(index[id(each)] for each in tensors)) for weight, tensors in inner.items()
        }

    def pieces(self) -> Iterator[tuple[WeightSlice, Tensor]]:
        """Pair each slice with its bytes, `(n,)` uint8 where the module's memory is now; until `drop_sources`."""
        return zip(self.slices, self._sources, strict=True)

    def pack(self, block: Tensor) -> None:
        for piece, memory in self.pieces():
            block[piece.start : piece.start + memory.nbytes].copy_(memory)

    def drop_sources(self) -> None:
        self._sources = []


def views(offsets: Sequence[OffsetTensor], block: Tensor) -> list[Tensor]:
    """Return views of `block`, uint8, in the shape of each of the `offsets`; some 4 microseconds each."""
    typed = {tensor.dtype: block.view(tensor.dtype) for tensor, *_ in offsets}
    found = []
    for tensor, start, stride in offsets:
        memory = typed[tensor.dtype]
        view = memory.as_strided(tensor.size(), stride, memory.storage_offset() + start // tensor.itemsize)
        view = torch._conj(view) if tensor.is_conj() else view
        found.append(torch._neg_view(view) if tensor.is_neg() else view)
    return found


def bind(offsets: Sequence[OffsetTensor], tensors: Sequence[Tensor]) -> None:
    """Point the tensors of `offsets` at these views; about a microsecond each."""
    for (tensor, *_), view in zip(offsets, tensors, strict=True):
        tensor.data = view


@dataclass
class MemoryRange:
    """Addresses [begin, end) of memory, and the tensors there."""

    begin: int
    end: int
    tensors: list[Tensor]

    @property
    def memory(self) -> Tensor:
        storage = self.tensors[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole[self.begin - storage.data_ptr() : self.end - storage.data_ptr()]


def memory_ranges(tensors: list[Tensor]) -> list[MemoryRange]:
    """Merge overlapping tensors into ranges, in the order of their first tensors."""
    ranges: list[MemoryRange] = []
    for tensor in sorted(tensors, key=lambda each: (str(each.device), each.data_ptr())):
        begin = tensor.data_ptr()
        end = begin + span_bytes(tensor)
        if ranges and tensor.device == ranges[-1].tensors[0].device and begin < ranges[-1].end:
            ranges[-1].end = max(ranges[-1].end, end)
            ranges[-1].tensors.append(tensor)
        else:
            ranges.append(MemoryRange(begin, end, [tensor]))
    rank = {id(tensor): i for i, tensor in enumerate(tensors)}
    return sorted(ranges, key=lambda each: min(rank[id(tensor)] for tensor in each.tensors))


def packed(ranges: Iterable[MemoryRange]) -> list[WeightSlice]:
    """Lay ranges out one after the other, aligned."""
    slices: list[WeightSlice] = []
    start = 0
    for each in ranges:
        num_bytes = -(-(each.end - each.begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets = tuple(
            OffsetTensor(tensor, start + tensor.data_ptr() - each.begin, tensor.stride()) for tensor in each.tensors
        )
        slices.append(WeightSlice(start, num_bytes, offsets))
        start += num_bytes
    return slices


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    steps = ((length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize
