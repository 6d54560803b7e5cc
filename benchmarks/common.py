"""What every benchmark shares: the record of the machine, timing, memory peaks, the results file and the table."""

import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

MIB = 2**20
# Of a card's nominal memory the CUDA context and the desktop take the rest: 7.3 GiB of 8 GB.
USABLE_SHARE = 0.9125
RESULTS_FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("hf_memopt", "torch", "transformers", "accelerate", "lerobot", "diffusers")


def current_device() -> torch.device:
    """The current accelerator, with its index, which some of torch's functions ask for; or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def usable_bytes(card_gb: float) -> int:
    """What a card of this nominal size leaves to tensors."""
    return round(USABLE_SHARE * card_gb * 2**30)


def limit_memory(card_gb: float | None) -> None:
    """Emulate a card's capacity by a limit on torch's allocator, for the current CUDA device; None: all that it has."""
    if torch.cuda.is_available():
        total_bytes = torch.cuda.mem_get_info()[1]
        share = 1.0 if card_gb is None else min(1.0, usable_bytes(card_gb) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share)


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions, commit and date, as they stand at the top of every results file."""
    return {
        "hardware": _hardware(device),
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "commit": measured_commit(),
        "date": date.today().isoformat(),
    }


def _hardware(device: torch.device) -> dict[str, Any]:
    facts = {
        "device": device.type,
        "name": _device_name(device),
        "num_cpu_threads": torch.get_num_threads(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type != "cpu":
        facts["device_memory_gib"] = round(torch.accelerator.get_memory_info(device)[1] / 2**30, 1)
        facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return facts


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return f"CPU {found.group(1) if found else platform.machine()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measured_commit() -> str | None:
    """The commit measured, with `-dirty` when tracked files differ from it.

    Where a checkout travels without git, `HF_MEMOPT_COMMIT` says it (`make gpu-bundle`); else None.
    """
    if commit := os.environ.get("HF_MEMOPT_COMMIT"):
        return commit
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def step_times_ms(
    step: Callable[[], object], device: torch.device, *, max_steps: int, max_seconds: float, min_steps: int = 2
) -> list[float]:
    """Duration of each call of `step`: accelerator events on an accelerator, `perf_counter` on the CPU.

    Stops after `max_steps`, or once `max_seconds` of wall clock are over and `min_steps` were taken.
    """
    clock = _cpu_step_ms if device.type == "cpu" else _device_step_ms
    begun = time.perf_counter()
    durations: list[float] = []
    while len(durations) < max_steps:
        if len(durations) >= min_steps and time.perf_counter() - begun > max_seconds:
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
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class PhasePeaks:
    """Highest number of allocated device bytes within each phase of a step; nothing on the CPU.

    The caching allocator keeps its books on the host as memory is requested, so no phase needs a synchronisation.
    Stands in for a policy's `PhaseMemory`, which never resets the counters and so cannot tell phases apart.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes: dict[str, int] = {}

    def start(self) -> None:
        """Begin the first phase."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def mark(self, phase: str) -> None:
        """End `phase` and begin the next one. Over several steps the highest peak counts."""
        if self._device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(self._device)
            self.peak_bytes[phase] = max(peak, self.peak_bytes.get(phase, 0))
            self.start()

    def figures(self) -> dict[str, float]:
        """Nothing for the policy to log."""
        return {}


def copied_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Bytes that one call of `step` copies over the host link, as CUDA's own trace lists them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return sum_copies(json.loads(trace.read_text()))


def sum_copies(trace: dict[str, Any]) -> dict[str, int]:
    """Copied bytes by direction in a trace of torch's profiler.

    Raises:
        RuntimeError: the trace holds no device activity at all, so a sum of 0 would mean nothing.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("gpu_memcpy", "kernel")]
    if not events:
        raise RuntimeError("the profiler recorded no device activity: is CUPTI available to this process?")
    directions = {"host_to_device": "HtoD", "device_to_host": "DtoH"}
    return {
        name: sum(e["args"]["bytes"] for e in events if e["cat"] == "gpu_memcpy" and label in e["name"])
        for name, label in directions.items()
    }


def free_memory(device: torch.device) -> None:
    """Give back whatever is no longer referenced, reference cycles included."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def pinned_bytes(device: torch.device) -> int | None:
    """Page-locked host memory that torch's allocator has handed out, rounded as it rounds; None without CUDA."""
    return torch.cuda.host_memory_stats().get("active_bytes.current", 0) if device.type == "cuda" else None


def host_rss_bytes() -> int:
    """Resident host memory of this process."""
    return int(psutil.Process().memory_info().rss)


def write_results(results: dict[str, Any], path: Path) -> Path:
    """Write `results` as JSON to `path`, which is replaced whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(unfinished, path)
    return path


def results_path(theme: str, device: torch.device, folder: Path = RESULTS_FOLDER) -> Path:
    """`results/<theme>-<hardware>.json`."""
    slug = re.sub(r"[^a-z0-9]+", "-", _device_name(device).lower()).strip("-")
    return folder / f"{theme}-{slug}.json"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns aligned to their widest cell: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((row[0].ljust(widths[0]), *numbers)).rstrip())
