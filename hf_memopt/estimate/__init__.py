"""Predicts the peak memory of a training step without the accelerator. Read in this order:

- `gpus`: the devices that can be predicted for.
- `simulation/`: an accelerator without hardware, on which the step really runs with fake tensors.
- `accounting/`: allocations by use, and the memory that CUDA's allocator would reserve for them.
- `simulated_step`: the step to simulate.
- `estimate`: `estimate_peak_memory`.
- `estimate_report`, `memory_page`, `memory_snapshot`: its answer in words, as an HTML page, and for torch's viewer.
"""

from hf_memopt.estimate.estimate import estimate_peak_memory
from hf_memopt.estimate.estimate_report import LargeTensor, MemoryEstimate
from hf_memopt.estimate.simulation.child_process import IsolatedError

__all__ = ["IsolatedError", "LargeTensor", "MemoryEstimate", "estimate_peak_memory"]
