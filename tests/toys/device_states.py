"""A device whose saved tensors go to host memory, without an offloader around it."""

import threading

import torch

from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.clock import HostClock
from hf_memopt.transfer.lower_memory import LowerHost


def above_host(copier: Copier | None = None, host_bytes: int | None = None) -> DeviceState:
    """Return the state of a CPU above host memory with a budget."""
    host = LowerHost(SyncCopier() if copier is None else copier, host_bytes)
    return DeviceState(torch.device("cpu"), [host], HostClock(), threading.RLock())
