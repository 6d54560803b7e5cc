"""Reads of weights that are not on the device, where it cannot read them at their home."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memopt.transfer import Copier
from hf_memopt.weights.packed_weights import WeightSlice
from hf_memopt.weights.streaming.access_trace import slices_read, takes_few_rows

# All bits set: NaN in every floating-point dtype.
NAN_BYTE = 0xFF
LARGEST_ITEM = 16


class AbsentReads(TorchDispatchMode):
    """Brings weights right before an operator reads them. Of an embedding's table, only the rows that are looked up.

    Costs some microseconds per operator, and a wait for the indices of each embedding whose table is absent: its rows
    are gathered on the host.

    Args:
        slices_of: slices by the id of a parameter or buffer.
        at_home: by the same ids, each tensor at its home, as the host reads it.
        absent: returns those of the slices that are not on the device.
        bring: puts slices onto the device, and takes none away.
    """

    def __init__(
        self,
        slices_of: Mapping[int, tuple[int, ...]],
        at_home: Mapping[int, Tensor],
        absent: Callable[[tuple[int, ...]], tuple[int, ...]],
        bring: Callable[[tuple[int, ...]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slices_of, self._at_home = slices_of, at_home
        self._absent, self._bring = absent, bring

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        absent = self._absent(slices_read(tree_leaves((args, kwargs)), self._slices_of))
        if absent and func is torch.ops.aten.embedding.default and takes_few_rows(*args[:2]):
            table, indices = self._at_home.get(id(args[0])), args[1]
            if table is not None:
                return func(table, indices.cpu(), *args[2:], **kwargs).to(indices.device)
        if absent:
            self._bring(absent)
        return func(*args, **kwargs)


def placeholders(slices: Sequence[WeightSlice], copier: Copier) -> list[list[Tensor]]:
    """Return by slice tensors like those of weights, on the device, that take no memory: all elements are the same.

    Floating-point elements are NaN, so that a read that nothing announced gives no figure that looks right.
    """
    memory = copier.empty_device(LARGEST_ITEM).fill_(NAN_BYTE)
    return [[placeholder(tensor, memory) for tensor, *_ in piece.offsets] for piece in slices]


def placeholder(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return a tensor like a weight whose elements are all the first one in memory; a write raises."""
    return memory.view(tensor.dtype).as_strided(tensor.size(), (0,) * tensor.dim())
