"""A frozen module's weights as one block of bytes, so that whole blocks are copied.

Weights quantised with torchao or bitsandbytes are plain tensors inside a wrapper, which travel like all others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memopt.autograd_state import PARAMETER_TYPES, PLAIN_TYPES
from hf_memopt.transfer import Copier


def is_quantised(tensor: Tensor) -> bool:
    """Return whether this is one of torchao's wrappers, which list their inner tensors (`__tensor_flatten__`)."""
    return _is_from("torchao", tensor) and hasattr(tensor, "__tensor_flatten__")


def _is_from(library: str, tensor: Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == library


def return_second_tensors(module: nn.Module) -> None:
    """Put `CB` back on weights in bitsandbytes' 8 bits, which the first call moves to the state of their layer."""
    for owner in module.modules():
        weight: Any = owner._parameters.get("weight")  # not what a parametrization computes
        state: Any = vars(owner).get("state")
        if weight is not None and _is_from("bitsandbytes", weight) and getattr(state, "CB", None) is not None:
            weight.CB, weight.SCB = state.CB, state.SCB


def inner_tensors(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a weight's bytes: itself, or those inside a quantised one.

    Raises ValueError for others: bitsandbytes keeps part of a weight in offsets that no interface lists, and a sharded
    weight's bytes are on other ranks.
    """
    if is_quantised(tensor):
        for field in _fields(tensor)[0]:
            yield from inner_tensors(f"{name}.{field}", getattr(tensor, field))
    elif type(tensor) in PLAIN_TYPES | PARAMETER_TYPES and tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor
    else:
        raise ValueError(
            f"frozen weight {name!r} is a {type(tensor).__name__} with layout {tensor.layout} on {tensor.device}; "
            "only plain dense tensors and those quantised with torchao can be offloaded. Load the model without "
            "sharding, and unquantised or quantised with torchao."
        )


def stored_tensors(name: str, tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a weight's large bytes, as `inner_tensors` does, and those of bitsandbytes.

    A weight in 8 bits has a second tensor on its bytes, `CB`. bitsandbytes' scales stay where they are: they are a few
    per cent, and no interface lists them.
    """
    if _is_from("bitsandbytes", tensor):
        yield tensor
        if getattr(tensor, "CB", None) is not None:
            yield tensor.CB
    else:
        yield from inner_tensors(name, tensor)


def claim_device(module: nn.Module, copier: Copier) -> None:
    """Replace each quantised weight by a wrapper on the copier's device, around the same bytes.

    A wrapper's device is fixed when it is made, while its inner tensors can be rebound. Operators ask the wrapper, and
    run where the inner tensors are.
    """
    replaced: dict[int, nn.Parameter] = {}
    borrowed: list[Tensor] = []
    for owner in module.modules():
        for name, weight in list(owner._parameters.items()):
            if weight is None or not is_quantised(weight):
                continue
            if id(weight) not in replaced:
                replaced[id(weight)] = _on_device(weight, copier, borrowed)
            owner._parameters[name] = replaced[id(weight)]
    for memory in borrowed:
        copier.release(memory)


def _on_device(weight: nn.Parameter, copier: Copier, borrowed: list[Tensor]) -> nn.Parameter:
    def empty(inner: Tensor) -> Tensor:
        block = copier.empty_device(inner.untyped_storage().nbytes())
        borrowed.append(block)
        return block.view(inner.dtype).as_strided(inner.size(), inner.stride(), inner.storage_offset())

    wrapper = nn.Parameter(rewrapped(weight, empty), requires_grad=False)
    for inside, outside in zip(inner_tensors("", wrapper), inner_tensors("", weight), strict=True):
        inside.data = outside.data
    return wrapper


def rewrapped(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a quantised weight with other plain tensors inside, on their device."""
    if not is_quantised(tensor):
        return replace(tensor)
    fields, context = _fields(tensor)
    inner = {field: rewrapped(getattr(tensor, field), replace) for field in fields}
    kind: Any = type(tensor)
    wrapper: Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return wrapper


def _fields(tensor: Any) -> tuple[list[str], Any]:
    fields: tuple[list[str], Any] = tensor.__tensor_flatten__()
    return fields


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
