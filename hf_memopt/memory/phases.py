"""Memory at the ends of a training step's phases."""

import psutil
import torch


class PhaseMemory:
    """Reads the memory counters where a phase of a step ends.

    Nothing is reset, since training loops keep peak counters of their own: on an accelerator the figure of a phase is
    the peak since the loop's own last reset (lerobot resets at the start of each step), so it grows from phase to
    phase, and the phase where it last grew sets the step's peak. On the CPU it is the process's resident memory.

    Args:
        device: where the model runs. Costs microseconds per mark and no device synchronisation.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._figures: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Record the memory at the end of `phase`."""
        if self._device.type == "cpu":
            self._figures[f"{phase}_rss_gib"] = psutil.Process().memory_info().rss / 2**30
        else:
            self._figures[f"{phase}_peak_gib"] = torch.accelerator.max_memory_allocated(self._device) / 2**30

    def figures(self) -> dict[str, float]:
        """The newest figure of every phase in GiB: `<phase>_peak_gib`, or `<phase>_rss_gib` on the CPU."""
        return dict(self._figures)
