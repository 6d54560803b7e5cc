"""Operations inside a dispatch mode, performed as they are outside of all modes.

torch hands an operation to a dispatch mode with everything above the modes switched off: autograd, autocast, the
materialising of lazy conjugates and negatives. For a kernel that only reads and writes memory that makes no difference.
A kernel that calls other operations loses what they rely on: torch 2.11 gives wrong complex pseudo-inverses inside any
mode, even an empty one, and computes `nn.Bilinear` under autocast in float32. Here these operations see again what was
switched on when the outer one was called; autograd alone stays off, as it does in the plain run.
"""

from typing import Any

import torch


def call_as_plain(operation: Any, args: Any, kwargs: Any) -> Any:
    """What `operation(*args, **kwargs)` gives outside of dispatch modes. For use in `__torch_dispatch__`; some 3 us."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        excluded = torch._C._dispatch_tls_local_exclude_set()
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._AutoDispatchBelowADInplaceOrView():
        return operation(*args, **kwargs)
