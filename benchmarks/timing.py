"""Measurement of times, peaks and copies of a training step."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # MHz, MHz, W, degrees Celsius


class NoDeviceActivityError(RuntimeError):
    """Raised if torch's profiler has recorded no activity of the device."""


def first_step_s(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a first step, with its compiling, page-locking and recording."""
    begun = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begun


def timed(step: Callable[[], object], device: torch.device, *, max_steps: int, max_seconds: float) -> dict[str, Any]:
    """Return step times, the allocator's peaks meanwhile, and the clocks; nothing on the CPU.

    `peak_over_start_bytes` is over the bytes allocated between steps.
    """
    if device.type == "cpu":
        return {}
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    clocks = _Clocks(device)
    times = step_times_ms(step, device, max_steps=max_steps, max_seconds=max_seconds)
    stats = torch.accelerator.memory_stats(device)
    peak = stats["allocated_bytes.all.peak"]
    return {
        "step_ms": {**median_and_spread(times), "num_steps": len(times)},
        "peak_bytes": peak,
        "peak_over_start_bytes": peak - before,
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "clocks": clocks.read(),
    }


class _Clocks:
    """The GPU's clocks while steps run, queried by nvidia-smi."""

    def __init__(self, device: torch.device) -> None:
        query = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={','.join(CLOCKS)}"]
        try:
            self._process = subprocess.Popen(
                [*query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except FileNotFoundError:
            self._process = None

    def read(self) -> dict[str, float] | None:
        """Return the figures; None without nvidia-smi, or if it has none."""
        if self._process is None:
            return None
        values = self._process.communicate()[0].strip().split(",")
        try:
            return {name: float(value) for name, value in zip(CLOCKS, values, strict=True)}
        except ValueError:
            return None


def step_times_ms(
    step: Callable[[], object], device: torch.device, *, max_steps: int, max_seconds: float
) -> list[float]:
    """Return the duration of each call, two at least, by accelerator events, or `perf_counter` on the CPU."""
    clock = _cpu_step_ms if device.type == "cpu" else _device_step_ms
    begun = time.perf_counter()
    durations: list[float] = []
    while len(durations) < max_steps:
        if len(durations) >= 2 and time.perf_counter() - begun > max_seconds:
            break
        durations.append(clock(step, device))
    return durations


def _cpu_step_ms(step: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def _device_step_ms(step: Callable[[], object], device: torch.device) -> float:
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record(torch.accelerator.current_stream(device))
    step()
    end.record(torch.accelerator.current_stream(device))
    end.synchronize()
    return start.elapsed_time(end)


def median_and_spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class PhasePeaks:
    """The highest number of allocated device bytes within each phase of a step; nothing on the CPU.

    The caching allocator counts on the host when memory is requested, so no phase needs a synchronisation.
    Replaces a policy's `PhaseMemory`, which never resets the counters and so cannot tell phases apart.
    """

    has_counters = False  # the policy logs nothing

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes: dict[str, int] = {}

    def start(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def mark(self, phase: str) -> None:
        """End a phase and begin the next one. Over several steps the highest peak counts."""
        if self._device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(self._device)
            self.peak_bytes[phase] = max(peak, self.peak_bytes.get(phase, 0))
            self.start()

    def mark_after_backward(self, loss: Tensor) -> None:
        """Do nothing: the benchmark marks the end of backward itself."""

    def figures(self) -> dict[str, float]:
        return {}


def copied_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Return the bytes that one call of `step` copies over the host link, by CUDA's own trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return sum_copies(json.loads(trace.read_text()))


def sum_copies(trace: dict[str, Any]) -> dict[str, int]:
    """Sum copied bytes by direction; raises without any device activity, where a sum of 0 would mean nothing."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("gpu_memcpy", "kernel")]
    if not events:
        raise NoDeviceActivityError("the profiler recorded no device activity: is CUPTI available to this process?")
    directions = {"host_to_device": "HtoD", "device_to_host": "DtoH"}
    return {
        name: sum(e["args"]["bytes"] for e in events if e["cat"] == "gpu_memcpy" and label in e["name"])
        for name, label in directions.items()
    }
