"""The memories below a device, nearest first, and the clock that tells how long compute waits for them."""

import time

import torch

from hf_memopt.transfer.backends import clock_for, copier_for
from hf_memopt.transfer.clock import Clock, SecondsClock
from hf_memopt.transfer.copier import Copier
from hf_memopt.transfer.disk_memory import DirectDisk, StagedDisk
from hf_memopt.transfer.disk_space import TierFile
from hf_memopt.transfer.lower_memory import LowerHost, LowerMemory
from hf_memopt.units import GIB

# Of the free host memory, the share that saved activations take where no budget is given.
_HOST_SHARE = 0.9
# Of the host memory that may be used, the share through which bytes pass on their way to a disk, at most so many bytes.
_STAGING_SHARE = 0.25
_MAX_STAGING_BYTES = 4 * GIB


def computes_in_host_memory(device: torch.device) -> bool:
    """Return whether a device has no memory of its own, so that copies to host memory free nothing."""
    if device.type == "cuda":
        return bool(torch.cuda.get_device_properties(device).is_integrated)
    return device.type in ("cpu", "mps", "meta")


def default_host_budget(free_bytes: int) -> int:
    """Return how much of the free host memory saved activations take, on their way to a disk too."""
    return round(_HOST_SHARE * free_bytes)


def host_bytes_beside_staging(budget_bytes: int) -> int:
    """Return how much of a host's budget is used before a disk below it is."""
    return budget_bytes - _staging_bytes(budget_bytes)


def memories_below(
    device: torch.device, copier: Copier | None, pin_memory: bool, host_budget_bytes: int, file: TierFile | None
) -> tuple[list[LowerMemory], Clock]:
    """Return the memories that saved activations can go to; none where there is neither other memory nor a file.

    A copier of the user's has copies made between any two memories. The host's budget is for bytes on their way to the
    disk too, whose `file` is below the host's memory.
    """
    is_alone = copier is None and computes_in_host_memory(device)  # copies to other host memory would free nothing
    if is_alone and file is None:
        return [], clock_for(device)
    if is_alone and file is not None and device.type == "cpu":
        # Without other processes' time, but with that in which this thread waits for the file.
        return [DirectDisk(file)], SecondsClock(lambda: time.thread_time() + file.waited_s)
    copier = copier_for(device, pin_memory) if copier is None else copier
    if file is None:
        return [LowerHost(copier, host_budget_bytes)], clock_for(device)
    disk = StagedDisk(file, copier, _staging_bytes(host_budget_bytes), is_below_host=not is_alone)
    host = [] if is_alone else [LowerHost(copier, host_bytes_beside_staging(host_budget_bytes))]
    return [*host, disk], clock_for(device)


def _staging_bytes(host_budget_bytes: int) -> int:
    return min(round(_STAGING_SHARE * host_budget_bytes), _MAX_STAGING_BYTES)
