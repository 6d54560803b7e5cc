"""The state of autograd, and the parts of a tensor: facts that saved-tensor hooks ask torch for."""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, UntypedStorage, nn
from torch._C._autograd import _unsafe_set_version_counter
from torch.nn.functional import rrelu
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The class of tensors on each device; subclasses need more in general. It is asked for every tensor saved.
PLAIN_TYPES: set[type[Tensor]] = {Tensor}
NO_BACKWARD = -1  # torch's number for a thread that is in no backward pass
# The backward pass that this thread is in. torch's own functions: they are asked once or twice for every saved tensor.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
# Whether this thread's backward pass leaves its graph to another one.
graph_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Operations through which a weight is recognised: they change its shape or dtype, not its numbers.
RESHAPING = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}

# Number of this thread's next autograd node. Tensors saved under the same number are saved by the same node, in a row.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr

# As it is at import: who watches backward passes by another one need not see those of this module.
_backward = torch.autograd.backward

_CALL = nn.Module._call_impl.__code__
_RRELU = rrelu.__code__


def current_node() -> int | None:
    """Return the number of the autograd node that this thread computes, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def in_backward() -> bool:
    return current_backward() != NO_BACKWARD


def forget_failed_backward() -> None:
    """Make torch's engine drop the nodes that a failed backward of this thread left in its queue.

    Otherwise they and their saved tensors go with the next backward of anything. Costs some 20 us.
    """
    if not in_backward():
        with torch.inference_mode(False), torch.enable_grad():
            _backward(torch.zeros((), device="cpu", requires_grad=True) * 1)


def calling_module() -> nn.Module | None:
    """Return the innermost module being called.

    It is found on the stack, since hooks on every module would make compiled ones compile again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Reading `f_locals` of other frames would make them keep their variables for as long as they run.
        if frame.f_code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None


def called_from_checkpoint(frame: FrameType | None) -> bool:
    """Return whether torch's checkpointing called autograd, to save the inputs of a region."""
    while frame is not None and frame.f_code.co_filename == torch.autograd.function.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__


def called_from_function(frame: FrameType | None) -> bool:
    """Return whether a custom `autograd.Function` is saving tensors, torch's checkpointing excepted."""
    is_function = frame is not None and frame.f_code.co_filename == torch.autograd.function.__file__
    return is_function and not called_from_checkpoint(frame)


def called_from_rrelu(frame: FrameType | None) -> bool:
    """Return whether a tensor is saved before its bytes are there: torch saves RReLU's noise and then draws it."""
    return frame is not None and frame.f_code is _RRELU


def in_recomputation() -> bool:
    """Return whether a backward runs a region under torch's checkpointing again."""
    return in_backward() and _inside_of(torch.utils.checkpoint.__file__)


def refuse_rrelu() -> None:
    """Raise where a copy of RReLU's noise is about to be used that was taken too early; see `called_from_rrelu`."""
    node = torch._C._current_autograd_node()
    # A checkpointed region is computed again, from its inputs, when the first of its nodes asks for anything.
    if type(node).__name__.startswith("RreluWithNoise") and not _inside_of(torch.utils.checkpoint.__file__):
        raise RuntimeError(
            "torch.rrelu saves its noise for backward before it draws it, so that a copy of it is of no use; call "
            "torch.nn.functional.rrelu, whose noise is left where it is"
        )


def _inside_of(file: str) -> bool:
    return any(frame.f_code.co_filename == file for frame, _ in traceback.walk_stack(sys._getframe(1)))


def may_be_cast_of_frozen_weight(tensor: Tensor) -> bool:
    """Return whether a saved tensor may be a copy, cast or dequantised, of a frozen weight of the module at work.

    Autograd shows no way from such a copy to its weight. A tensor without history and of as many numbers counts: to
    leave something else of the kind on the device costs memory only.
    """
    if tensor.requires_grad or not tensor.is_floating_point():
        return False
    module = calling_module()
    num_bytes = tensor.untyped_storage().nbytes()
    return module is not None and any(
        not weight.requires_grad and weight.numel() * tensor.itemsize == num_bytes
        for weight in module._parameters.values()
        if weight is not None
    )


def is_weight(tensor: Tensor) -> bool:
    """Return whether a plain tensor is a leaf that requires grad, or a view or cast of one, reached without arithmetic.

    The leaf's gradient accumulator keeps it in memory as long as the graph is alive, parameter or not.
    """
    if tensor._base is not None and isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while type(node).__name__ in RESHAPING and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"


# Classes of parameters that are plain tensors.
PARAMETER_TYPES: set[type[Tensor]] = {nn.Parameter}
# Set on parameters whose bytes are brought before each use.
COMES_AND_GOES = "_hf_memopt_comes_and_goes"


def is_regathered(tensor: Tensor) -> bool:
    """Return whether a tensor is, or is a view of, a weight that is brought before each use.

    DeepSpeed's ZeRO-3 frees it after the use by exchanging the parameter's `.data`, so that an alias would keep it in
    memory. `StreamedWeights` takes the bytes away from all aliases.
    """
    parameter = tensor if tensor._base is None else tensor._base
    return not getattr(parameter, "ds_persist", True) or hasattr(parameter, COMES_AND_GOES)


class _Empty(dict[tuple[torch.dtype, torch.device], Tensor]):
    """Tensors without memory. Their `.data` counts modifications anew, in a third of the time of `torch.empty(0)`."""

    def __missing__(self, key: tuple[torch.dtype, torch.device]) -> Tensor:
        with torch.inference_mode(False):
            self[key] = torch.empty(0, dtype=key[0], device=key[1])
        return self[key]

    def beside(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return one on the device of a tensor, and fake if that is."""
        if type(tensor) is Tensor or type(tensor) in PARAMETER_TYPES:
            return self[dtype, tensor.device]
        return tensor.new_empty(0, dtype=dtype)


_EMPTY = _Empty()


class ViewMeta:
    """Dtype, offset, size, stride and lazy bits of a tensor: all but its storage's bytes."""

    __slots__ = ("_conj", "_dtype", "_neg", "_offset", "_size", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()

    @property
    def geometry(self) -> tuple[int, torch.Size, tuple[int, ...], int]:
        """Offset, size and stride in elements, and the bytes of an element."""
        return int(self._offset), self._size, self._stride, self._dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return the same view of other memory, `(num_bytes,)` uint8 or of the view's dtype.

        The memory may begin anywhere in a storage of its own, at a multiple of the view's elements.
        """
        view = _EMPTY.beside(memory, self._dtype).data
        offset = self._offset + memory.storage_offset() * memory.itemsize // self._dtype.itemsize
        view.set_(memory.untyped_storage(), offset, self._size, self._stride)
        if self._conj:
            view = torch._conj(view)
        return torch._neg_view(view) if self._neg else view


class StoragePin(int):
    """As long as it exists, no other storage is given this one's key, however dead this one is.

    The weak reference's own number, which it frees. torch's `StorageWeakRef` takes five times as long.
    """

    __slots__ = ()

    _free = staticmethod(UntypedStorage._free_weak_ref)

    @classmethod
    def of(cls, storage: UntypedStorage) -> "StoragePin":
        reference: Any = storage._weak_ref()
        return cls(reference)

    def __del__(self) -> None:
        self._free(self)


def num_tensors_on(key: int) -> int:
    """Return how many tensors share the live storage of a key, views with a Python object or without one alike."""
    num_references: int = torch._C._storage_Use_Count(key)
    return num_references - _references_besides_tensors()


@cache
def _references_besides_tensors() -> int:
    """Return the references to a storage whose Python object was asked for once, other than by its tensors."""
    tensor = torch.empty(1, device="cpu")
    num_references: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return num_references - 1


class VersionGuard:
    """Notices in-place modification of a tensor without keeping its memory.

    A detached alias shares the version counter; giving it other data does not change that (canary-tested).
    """

    __slots__ = ("alias", "shape", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.alias.data = _EMPTY.beside(tensor, tensor.dtype)
        self.shape = tensor.shape
        self.version = tensor._version

    def twin(self) -> "VersionGuard":
        twin = VersionGuard.__new__(VersionGuard)
        twin.alias, twin.shape, twin.version = self.alias, self.shape, self.version
        return twin

    def was_modified(self) -> bool:
        return self.alias._version != self.version

    def covers(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the same storage still has the bytes that are guarded.

        Equal version numbers alone say nothing: the results of `unsafe_chunk` share one storage, and each counts its
        own modifications.
        """
        return tensor._version == self.version and same_counter(tensor, self.alias)

    def counted_together(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same bytes, counted with the guarded one, so that a backward's writes are noticed."""
        counted = self.alias.detach()
        counted.data = tensor
        return counted

    def check(self) -> None:
        """Raise the error of autograd's own check, which saved-tensor hooks switch off."""
        if self.alias._version != self.version:
            raise modified_in_place(self.alias, self.shape, self.version)


def unwrapped(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that a tensor is made of: itself, or those that a subclass wraps."""
    if type(tensor) in PLAIN_TYPES or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    for part in parts:
        if isinstance(part, Tensor):  # from torch 2.15 on, a sharded one also names its mesh
            yield from unwrapped(part)


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a sparse tensor; of any other one, itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, `(num_bytes,)` uint8."""
    return _EMPTY.beside(tensor, torch.uint8).data.set_(tensor.untyped_storage())


def is_plain(tensor: Tensor) -> bool:
    is_of_type = type(tensor) in PLAIN_TYPES or type(tensor) in PARAMETER_TYPES
    return is_of_type and tensor.layout is torch.strided and not tensor.is_nested and not tensor._is_zerotensor()


def same_counter(first: Tensor, second: Tensor) -> bool:
    """Try whether in-place modifications of two tensors of equal version are counted together, and take it back."""
    version = first._version
    _unsafe_set_version_counter((first,), (version + 1,))
    try:
        return second._version == version + 1
    finally:
        _unsafe_set_version_counter((first,), (version,))


def modified_in_place(tensor: Tensor, shape: torch.Size, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {expected} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
