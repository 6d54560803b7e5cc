"""Who is at work: the module whose forward saves a tensor or performs an operation.

Found on the stack, since hooks on every module would make compiled ones compile again.
"""

import sys
from types import FrameType

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import rrelu

_CALL = nn.Module._call_impl.__code__
_RRELU = rrelu.__code__


def calling_module() -> nn.Module | None:
    """The innermost module being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # No other frame is looked into: reading `f_locals` makes a frame keep what is in it, for as long as it runs.
        if frame.f_code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None


def called_from_checkpoint(frame: FrameType | None) -> bool:
    """Whether torch's checkpointing is saving the inputs of a region: it is what called autograd."""
    while frame is not None and frame.f_code.co_filename == torch.autograd.function.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__


def called_from_rrelu(frame: FrameType | None) -> bool:
    """Whether a tensor is saved before its bytes are there: torch saves RReLU's noise and then draws it."""
    return frame is not None and frame.f_code is _RRELU


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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


def may_be_cast_of_frozen_weight(tensor: Tensor) -> bool:
    """Whether the module at work has a frozen weight of which a saved tensor may be a copy: cast or dequantised.

    Autograd shows no way from such a copy to its weight, as it does for a trainable one. A tensor without history and
    of as many numbers counts: to leave something else of the kind on the device costs memory only.
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
