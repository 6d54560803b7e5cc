"""Operations inside a dispatch mode, performed as they are outside of all modes.

torch hands an operation to a dispatch mode with everything above the modes switched off: autograd, autocast, the
materialising of lazy conjugates and negatives. A kernel that calls other operations loses the keys that they rely on:
torch 2.11 gives wrong complex pseudo-inverses inside any mode, even an empty one, and computes `nn.Bilinear` under
autocast in float32. Here these operations see again the keys that were on when the outer one was called; autograd alone
stays off, as in the plain run.

Of torch's own operations autocast is given back to bilinear forms and, from torch 2.15 on, polar decompositions alone.
Other composite kernels are in its lists, or are called by operations that are (`pinverse`, `lstsq`), so that in the
plain run they find their operands cast and autocast switched off, which cannot be seen from inside of a mode. Custom
operations find it as their callers have it, unless they are registered for it themselves.
"""

from functools import cache
from typing import Any

import torch

_SEE_AUTOCAST = ("aten::_trilinear", "aten::linalg_polar")
_OF_TORCH = ("aten", "prim", "prims")  # the dispatcher does not know those of "prim"
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastPrivateUse1")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _name in _AUTOCAST_KEYS:
    _AUTOCAST |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def call_as_plain(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return `operation(*args, **kwargs)` as outside of dispatch modes, within `__torch_dispatch__`; some 3 us."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded if _sees_autocast(operation) else excluded | _AUTOCAST
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._AutoDispatchBelowADInplaceOrView():
        return operation(*args, **kwargs)


@cache
def _sees_autocast(operation: Any) -> bool:
    """Return whether in the plain run operations called by this one find autocast as its caller has it."""
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    name = operation.name()  # type: ignore[no-untyped-call]
    if operation.namespace in _OF_TORCH:
        return name.partition(".")[0] in _SEE_AUTOCAST
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _AUTOCAST_KEYS)
