"""Memory at the ends of a training step's phases."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memopt.memory.device_counters import Host, counters_for
from hf_memopt.units import GIB


class PhaseMemory:
    """Reads the memory counters where a phase of a step ends, for figures that go into a policy's own log.

    Nothing is reset, since training loops keep peak counters of their own: on an accelerator a phase's figure is the
    peak since the loop's own last reset (lerobot resets at the start of each step), so it grows from phase to phase,
    and the phase where it last grew sets the step's peak. On the CPU it is the process's resident memory.
    `MemoryTracker` tells phases apart. Costs microseconds per mark and no device synchronisation.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._counters = counters_for(self._device)
        self._host = Host()
        self._figures: dict[str, float] = {}

    def __reduce__(self) -> Any:
        # Copies and pickles measure for themselves: a handle of the process is no use to another one.
        return PhaseMemory, (self._device,)

    @property
    def has_counters(self) -> bool:
        """Return whether the figures are of device memory; otherwise they are of host memory."""
        return self._counters is not None

    def mark(self, phase: str) -> None:
        if self._counters is None:
            self._figures[f"memory/{phase}_host_rss_gib"] = self._host.rss_bytes() / GIB
        else:
            self._figures[f"memory/{phase}_peak_gib"] = self._counters.read().peak_allocated_bytes / GIB

    def mark_after_backward(self, loss: Tensor) -> None:
        """Record the memory at the end of the backward pass from `loss` as the phase `backward`."""
        if loss.requires_grad:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda grad: queue(partial(self.mark, "backward")))  # type: ignore[no-untyped-call]

    def figures(self) -> dict[str, float]:
        """Return each phase's newest figure in GiB: `memory/<phase>_peak_gib`, or `..._host_rss_gib` on the CPU."""
        return dict(self._figures)
