"""Predicts the peak memory of a training step without the accelerator; README.md follows one step through the files."""

from hf_memopt.estimate.estimate import estimate_peak_memory
from hf_memopt.estimate.estimate_report import LargeTensor, MemoryEstimate
from hf_memopt.estimate.simulation.child_process import IsolatedError

__all__ = ["IsolatedError", "LargeTensor", "MemoryEstimate", "estimate_peak_memory"]
