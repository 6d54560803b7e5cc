"""The fake device of this process: settings, faults that tests plan, and faults that the runtime has found."""

import ctypes
import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = "FAKE_CUDA_LIBRARIES"  # environment variable: the folder that `build.built` returns


def is_loaded() -> bool:
    return LIBRARIES in os.environ


def _load() -> ctypes.CDLL:
    runtime = ctypes.CDLL("libcudart.so.13")  # already preloaded
    runtime.fake_cuda_get.restype = ctypes.c_double
    runtime.fake_cuda_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    runtime.fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    runtime.fake_cuda_num_calls.argtypes, runtime.fake_cuda_num_calls.restype = [ctypes.c_char_p], ctypes.c_int64
    runtime.fake_cuda_leave_free.argtypes = [ctypes.c_int, ctypes.c_int64]
    runtime.fake_cuda_faults.restype = runtime.fake_cuda_delays.restype = ctypes.c_char_p
    for what in ["timed_events", "streams", "device_blocks", "registrations"]:
        getattr(runtime, f"fake_cuda_num_{what}").restype = ctypes.c_int64
    return runtime


def install_operators() -> None:
    import torch

    operators = Path(os.environ[LIBRARIES]) / "liboperators.so"
    torch.cuda.init()  # the allocator, which the operators watch
    for device in range(torch.cuda.device_count()):
        torch.cuda.Stream(device)  # makes the whole pool of streams
    ctypes.CDLL(str(operators)).fake_cuda_install_operators()


@contextmanager
def settings(**changed: float) -> Iterator[None]:
    """Change settings of `runtime/runtime.hpp` for a while; torch reads devices, capability and memory once."""
    runtime = _load()
    before = {name: runtime.fake_cuda_get(name.encode()) for name in changed}
    unknown = [name for name, value in before.items() if math.isnan(value)]
    if unknown:
        raise ValueError(f"the fake device has no settings {unknown}; runtime/settings.cpp lists them")
    try:
        for name, value in changed.items():
            runtime.fake_cuda_set(name.encode(), value)
        yield
    finally:
        for name, value in before.items():
            runtime.fake_cuda_set(name.encode(), value)


def restart_schedule() -> None:
    """Let the same work get the same delays again."""
    _load().fake_cuda_restart_schedule()


def delays() -> list[list[float]]:
    """Return delays in seconds by stream, in the order of first use, since the schedule's restart."""
    return [[float(delay) for delay in line.split()] for line in _load().fake_cuda_delays().decode().splitlines()]


def fail(kind: str, k: int = 1, times: int = 1) -> None:
    """Fail `times` calls from the k-th on. Kinds of calls are "malloc", "host_register", "copy" and "event"."""
    _load().fake_cuda_fail(kind.encode(), k, times)


def num_calls(kind: str) -> int:
    """Count the calls so far of a kind that `fail` knows."""
    return int(_load().fake_cuda_num_calls(kind.encode()))


def leave_free(num_bytes: int, device: int = 0) -> None:
    """Take the device's memory, as other processes might."""
    _load().fake_cuda_leave_free(device, num_bytes)


def give_back(device: int = 0) -> None:
    """Undo `leave_free`."""
    _load().fake_cuda_give_back(device)


def faults() -> list[str]:
    """Return a line for each fault since `forget_faults`, and for errors never read."""
    return _load().fake_cuda_faults().decode().splitlines()


def forget_faults() -> None:
    """Also forget planned failures and errors, so that a broken device works again."""
    _load().fake_cuda_fail_no_more()
    _load().fake_cuda_forget_faults()


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Record a fault for each call, in any thread, that makes the host wait for the device."""
    _load().fake_cuda_enter_region_without_waiting()
    try:
        yield
    finally:
        _load().fake_cuda_leave_region_without_waiting()


@dataclass(frozen=True)
class Holdings:
    registrations: int  # of host memory
    device_blocks: int
    events: int  # with timing; torch's caches keep others
    streams: int

    def more_than(self, before: "Holdings") -> list[str]:
        """Return a line for each grown count."""
        now, then = vars(self), vars(before)
        return [f"{now[name] - then[name]} {name} left over" for name in now if now[name] > then[name]]


def holdings() -> Holdings:
    """Collect garbage, wait for all devices and release torch's caches first."""
    import torch

    gc.collect()
    for device in range(torch.cuda.device_count()):
        if torch.cuda.is_initialized() and not _load().fake_cuda_is_broken(device):
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    runtime = _load()
    return Holdings(
        runtime.fake_cuda_num_registrations(),
        runtime.fake_cuda_num_device_blocks(),
        runtime.fake_cuda_num_timed_events(),
        runtime.fake_cuda_num_streams(),
    )
