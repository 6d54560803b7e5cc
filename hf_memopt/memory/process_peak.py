"""The most memory that a process uses for a while: the device's, or on a CPU the process's own."""

import os
import re
from pathlib import Path

import torch

# Linux' files of this process: writing 5 to the first has the second's VmHWM begin again.
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif os.access(_RESET, os.W_OK):
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes since `reset_peak`: that torch has allocated on an accelerator, resident ones on a CPU.

    None on a CPU whose system does not tell.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if not os.access(_RESET, os.W_OK):
        return None
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return 1024 * int(kib)
