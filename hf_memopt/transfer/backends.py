"""The functions that the library needs of each type of device; a type not registered has streams, as CUDA.

A simulation registers its device while it runs: nothing else tells the library that nothing is really computed.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_memopt.autograd_state import PLAIN_TYPES
from hf_memopt.transfer.clock import Clock, HostClock, SecondsClock, StreamClock
from hf_memopt.transfer.copier import Copier, StreamCopier, SyncCopier
from hf_memopt.transfer.disk_space import TierFile
from hf_memopt.transfer.host_memory import available_bytes, mapped_on_cuda
from hf_memopt.transfer.scratch_file import open_scratch_file


@dataclass(frozen=True)
class DeviceBackend:
    """The copier, clock, host memory and disk of a type of device, and the class of its tensors.

    Attributes:
        make_copier: of the device, whether host memory is pinned, and the purpose of the copies.
        map_host: host memory, `(num_bytes,)` uint8, as the device reads it in place; a ValueError where it cannot.
        hide_operations: a context whose operations are hidden from dispatch modes that watch the training step.
        tensor_class: class of tensors that are nothing but a piece of memory and a view of it.
        is_unlimited: whether its memory is the host's, or cannot run out.
        free_host_bytes: host memory that copies may take.
        open_file: of the user's folder, if there is one, and the most bytes: the file below the host, if there is one.
        home_in_files: makes a home in simulated files, of `PackedWeights`, their device, its copier and the home of
            slices that are written. None where files are real.
        has_values: whether tensors have numbers, which those of a simulation have not.
    """

    make_copier: Callable[[torch.device, bool, str], Copier] = lambda device, pin, purpose: StreamCopier(device, pin)
    make_clock: Callable[[torch.device], Clock] = StreamClock
    map_host: Callable[[Tensor, torch.device], Tensor] = mapped_on_cuda
    hide_operations: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
    tensor_class: type[Tensor] = Tensor
    is_unlimited: bool = False
    free_host_bytes: Callable[[], int] = available_bytes
    open_file: Callable[[str | os.PathLike[str] | None, int | None], TierFile | None] = open_scratch_file
    home_in_files: Callable[[Any, torch.device, Copier, Any], Any] | None = None
    has_values: bool = True


_ACCELERATOR = DeviceBackend()
_CPU = DeviceBackend(lambda device, pin, purpose: SyncCopier(), lambda device: HostClock(), is_unlimited=True)
_MPS = DeviceBackend(
    lambda device, pin, purpose: SyncCopier(device),
    lambda device: SecondsClock(time.perf_counter),  # the host waits for its copies
    is_unlimited=True,
)
_REGISTERED = {"cpu": _CPU, "mps": _MPS}


def backend_of(device: torch.device) -> DeviceBackend:
    return _REGISTERED.get(device.type, _ACCELERATOR)


@contextmanager
def registered(name: str, entry: DeviceBackend) -> Iterator[None]:
    before, classes = dict(_REGISTERED), set(PLAIN_TYPES)
    _REGISTERED[name] = entry
    PLAIN_TYPES.add(entry.tensor_class)
    try:
        yield
    finally:
        _REGISTERED.clear()
        _REGISTERED.update(before)
        PLAIN_TYPES.intersection_update(classes)


def copier_for(device: torch.device | str, pin_memory: bool = True, purpose: str = "activations") -> Copier:
    """Return the copier that suits a device: side streams on an accelerator, plain copies on the CPU.

    Args:
        device: the device that computes.
        pin_memory: whether host memory is page-locked.
        purpose: "activations", "teacher" or "base", under which simulations book the device memory.
    """
    device = torch.device(device)
    return backend_of(device).make_copier(device, pin_memory, purpose)


def clock_for(device: torch.device | str) -> Clock:
    """Return the clock of the device that computes."""
    device = torch.device(device)
    return backend_of(device).make_clock(device)


def readable_in_place(memory: Tensor, device: torch.device) -> Tensor:
    """Return the same bytes as the device sees them; a ValueError where it cannot read this memory."""
    return memory if memory.device.type == device.type else backend_of(device).map_host(memory, device)
