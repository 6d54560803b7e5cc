"""Predicts the peak memory of a training step without the accelerator; README.md follows one step through the files.

It imports late, so that a card is found without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # spelled "x as x": exported names, for type checkers
    from hf_memopt.estimate.estimate import estimate_peak_memory as estimate_peak_memory
    from hf_memopt.estimate.estimate_report import LargeTensor as LargeTensor
    from hf_memopt.estimate.estimate_report import MemoryEstimate as MemoryEstimate
    from hf_memopt.estimate.simulation.child_process import IsolatedError as IsolatedError

_HOMES = {
    "IsolatedError": "estimate.simulation.child_process",
    "LargeTensor": "estimate.estimate_report",
    "MemoryEstimate": "estimate.estimate_report",
    "estimate_peak_memory": "estimate.estimate",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_memopt.{_HOMES[name]}"), name)
