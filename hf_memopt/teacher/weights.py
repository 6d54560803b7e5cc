"""A frozen module's weights as one block of bytes, so that one copy moves them all."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Large enough for every dtype and for the vectorised loads of CUDA kernels.
_ALIGNMENT_BYTES = 256


@dataclass
class _Segment:
    """Addresses [begin, end) of the module's memory, held at `start` in the block. Tied tensors share a segment."""

    begin: int
    end: int
    start: int
    tensors: list[Tensor]


class PackedWeights:
    """Rebinds a module's parameters and buffers, persistent or not, to views of one block of bytes.

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
        own = {name: tensor for name, tensor in named if id(tensor) not in excluded}
        for name, tensor in own.items():
            _refuse_unpackable(name, tensor)
        self._segments = _segments([tensor for tensor in own.values() if tensor.numel()])
        self._places = [
            (tensor, segment.start + tensor.data_ptr() - segment.begin)
            for segment in self._segments
            for tensor in segment.tensors
        ]
        last = self._segments[-1] if self._segments else _Segment(0, 0, 0, [])
        self.num_bytes = _aligned(last.start + last.end - last.begin)

    def pack(self, block: Tensor) -> list[Tensor]:
        """Copy the weights to `block`, `(num_bytes,)` uint8 on any device; returns `views(block)`."""
        for segment in self._segments:
            storage = segment.tensors[0].untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            begin, end = segment.begin - storage.data_ptr(), segment.end - storage.data_ptr()
            block[segment.start : segment.start + end - begin].copy_(memory[begin:end])
        return self.views(block)

    def views(self, block: Tensor) -> list[Tensor]:
        """The weights as they lie in `block`, which holds what `pack` wrote or a copy of it."""
        typed = {tensor.dtype: block.view(tensor.dtype) for tensor, _ in self._places}
        return [
            typed[tensor.dtype].as_strided(
                tensor.size(), tensor.stride(), typed[tensor.dtype].storage_offset() + start // tensor.itemsize
            )
            for tensor, start in self._places
        ]

    def bind(self, views: list[Tensor]) -> None:
        """Make the module's tensors those views. About a microsecond each."""
        for (tensor, _), view in zip(self._places, views, strict=True):
            tensor.data = view


def _segments(tensors: list[Tensor]) -> list[_Segment]:
    segments: list[_Segment] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        begin = tensor.data_ptr()
        end = begin + _span_bytes(tensor.size(), tensor.stride(), tensor.dtype)
        last = segments[-1] if segments else None
        if last is not None and begin < last.end:
            last.end = max(last.end, end)
            last.tensors.append(tensor)
        else:
            start = 0 if last is None else _aligned(last.start + last.end - last.begin)
            segments.append(_Segment(begin, end, start, [tensor]))
    return segments


def _span_bytes(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> int:
    return (sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1) * dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _refuse_unpackable(name: str, tensor: Tensor) -> None:
    if type(tensor.data) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(
            f"teacher weight {name!r} is a {type(tensor.data).__name__} with layout {tensor.layout} on "
            f"{tensor.device}; only plain dense tensors can be offloaded. Load the teacher without quantisation or "
            "sharding."
        )
