"""A frozen module's weights as one block of bytes, so that copies of whole blocks move them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_memopt.teacher.quantised import inner_tensors

# Large enough for every dtype and for the vectorised loads of CUDA kernels.
ALIGNMENT_BYTES = 256

# A tensor and the byte of a block where its first element lies.
Place = tuple[Tensor, int]


@dataclass(frozen=True)
class Segment:
    """Memory that is packed as one piece; tensors that overlap, as tied ones do, share a segment.

    Attributes:
        start: where it lies in the block, aligned.
        num_bytes: how far it reaches, padding included.
        places: its tensors, and where they lie in the block.
    """

    start: int
    num_bytes: int
    places: tuple[Place, ...]


class PackedWeights:
    """A module's parameters and buffers, persistent or not, in the order in which they are registered.

    Args:
        module: the frozen module.
        exclude: parameters that live elsewhere.

    Raises:
        ValueError: a tensor is of a subclass or layout whose memory cannot be rebound.

    Tensors that overlap in memory are packed, and later copied, once. Strides and offsets are kept.
    """

    def __init__(self, module: nn.Module, exclude: Iterable[nn.Parameter] = ()) -> None:
        excluded = {id(parameter) for parameter in exclude}
        named = [*module.named_parameters(), *module.named_buffers()]
        inner = {
            id(tensor): [each for each in inner_tensors(name, tensor) if each.numel()]
            for name, tensor in named
            if id(tensor) not in excluded
        }
        extents = _extents([tensor for tensors in inner.values() for tensor in tensors])
        self._sources = [extent.memory for extent in extents]
        self.segments = _packed(extents)
        self.places = [place for segment in self.segments for place in segment.places]
        self.num_bytes = sum(segment.num_bytes for segment in self.segments)
        index = {id(tensor): i for i, segment in enumerate(self.segments) for tensor, _ in segment.places}
        # By the identity of a parameter, of a buffer, or of a tensor inside a quantised one: which segments hold it.
        self.segments_of = {each: (number,) for each, number in index.items()} | {
            weight: tuple(dict.fromkeys(index[id(each)] for each in tensors)) for weight, tensors in inner.items()
        }

    def pieces(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each segment with its bytes, `(n,)` uint8 where the module's memory is now; until `let_go`."""
        return zip(self.segments, self._sources, strict=True)

    def pack(self, block: Tensor) -> None:
        """Copy the weights to `block`, `(num_bytes,)` uint8 on any device."""
        for segment, memory in self.pieces():
            block[segment.start : segment.start + memory.nbytes].copy_(memory)

    def let_go(self) -> None:
        """Keep the memory alive no longer that the weights came in. They are in a block now."""
        self._sources = []


def views(places: Sequence[Place], block: Tensor) -> list[Tensor]:
    """The tensors of `places` as they lie in `block`, uint8; some 4 microseconds each."""
    typed = {tensor.dtype: block.view(tensor.dtype) for tensor, _ in places}
    return [
        typed[tensor.dtype].as_strided(
            tensor.size(), tensor.stride(), typed[tensor.dtype].storage_offset() + start // tensor.itemsize
        )
        for tensor, start in places
    ]


def bind(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    """Make the tensors of `places` those views. About a microsecond each."""
    for (tensor, _), view in zip(places, tensors, strict=True):
        tensor.data = view


@dataclass
class _Extent:
    """Addresses [begin, end) of the module's memory, and what lies there."""

    begin: int
    end: int
    tensors: list[Tensor]

    @property
    def memory(self) -> Tensor:
        storage = self.tensors[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole[self.begin - storage.data_ptr() : self.end - storage.data_ptr()]


def _extents(tensors: list[Tensor]) -> list[_Extent]:
    """Of tensors that overlap, one extent; in the order in which their first tensors come."""
    extents: list[_Extent] = []
    for tensor in sorted(tensors, key=lambda each: each.data_ptr()):
        begin = tensor.data_ptr()
        end = begin + _span_bytes(tensor)
        if extents and begin < extents[-1].end:
            extents[-1].end = max(extents[-1].end, end)
            extents[-1].tensors.append(tensor)
        else:
            extents.append(_Extent(begin, end, [tensor]))
    rank = {id(tensor): i for i, tensor in enumerate(tensors)}
    return sorted(extents, key=lambda extent: min(rank[id(tensor)] for tensor in extent.tensors))


def _packed(extents: list[_Extent]) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for extent in extents:
        num_bytes = -(-(extent.end - extent.begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        places = tuple((tensor, start + tensor.data_ptr() - extent.begin) for tensor in extent.tensors)
        segments.append(Segment(start, num_bytes, places))
        start += num_bytes
    return segments


def _span_bytes(tensor: Tensor) -> int:
    steps = ((length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize
