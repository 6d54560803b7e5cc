"""Operations inside a dispatch mode, performed as they are outside of all modes.

torch hands an operation to a dispatch mode with everything above the modes switched off: autograd, autocast, the
materialising of lazy conjugates and negatives. For a kernel that only reads and writes memory that makes no difference.
A kernel that calls other operations loses what they rely on: torch 2.11 gives wrong complex pseudo-inverses inside any
mode, even an empty one, and computes `nn.Bilinear` under autocast in float32. Here these operations see again what was
switched on when the outer one was called; autograd alone stays off, as it does in the plain run.

Autocast is given back to bilinear forms alone. Other composite kernels are in its lists, or are called by operations
that are (`pinverse`, `lstsq`), so that in the plain run they find their operands cast and autocast switched off, which
cannot be seen from inside of a mode.
"""

from typing import Any

import torch

_SEES_AUTOCAST = torch.ops.aten._trilinear.default
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _name in ("AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastPrivateUse1"):
    _AUTOCAST |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def call_as_plain(operation: Any, args: Any, kwargs: Any) -> Any:
    """What `operation(*args, **kwargs)` gives outside of dispatch modes. For use in `__torch_dispatch__`; some 3 us."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded if operation is _SEES_AUTOCAST else excluded | _AUTOCAST
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._AutoDispatchBelowADInplaceOrView():
        return operation(*args, **kwargs)
