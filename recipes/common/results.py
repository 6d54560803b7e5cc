"""The cost and the results of a run: tables, `results.json`, and figures where matplotlib is installed."""

import importlib.util
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt.activations import ActivationOffloader
from hf_memopt.memory.device_counters import peak_bytes, reset_peak
from hf_memopt.recipes.common.options import OffloadOptions
from hf_memopt.report.tables import mode_table
from hf_memopt.units import MIB

logger = logging.getLogger(__name__)

History = list[dict[str, float]]  # one entry for each log line


def num_parameters(model: nn.Module) -> int:
    """Return how many numbers training changes; a complex one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def run_results(run: Any, cost: Any, libraries: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Return the common contents of `results.json`; `libraries` add their versions, `more` the recipe's own entries."""
    found = {"mode": run.options.offload.offload, **environment(run.accelerator, libraries)}
    return {**found, "history": run.progress.history, "training_cost": cost, **more}


def environment(accelerator: Accelerator, libraries: Sequence[str] = ()) -> dict[str, Any]:
    device = accelerator.device
    return {
        "device": "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: version(name) for name in ("torch", "accelerate", *libraries)},
    }


def psnr(output: Tensor, target: Tensor) -> float:
    """Return dB over all images in [-1, 1]."""
    return float(10 * torch.log10(4 / (output - target).square().mean()))


def write_results(results: dict[str, Any], folder: Path) -> None:
    # JSON has no numbers that are not finite: an error on test data that hold such is null.
    plain = json.loads(json.dumps(results, default=asdict), parse_constant=lambda name: None)
    (folder / "results.json").write_text(json.dumps(plain, indent=2) + "\n")


def can_draw(figure: str) -> bool:
    """Return whether matplotlib is installed; where it is not, log that `figure` will be missing."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        logger.info(f"No {figure}: it needs matplotlib, which the extra 'report' installs")
    return found


def plot_history(axes: Any, history: History, unit: str, labels: Mapping[str, str], style: str, **look: Any) -> None:
    for name, label in labels.items():
        points = [(entry[unit], entry[name]) for entry in history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, **look)


@contextmanager
def drawn(
    file: Path, rows: int, columns: int, dpi: int = 100, figsize: tuple[float, float] | None = None, **settings: Any
) -> Iterator[Any]:
    """Yield the axes of a new figure, as `Figure.subplots` gives them, and save it at the end. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    yield figure.subplots(rows, columns, **settings)
    figure.savefig(file, dpi=dpi)


SAVED_CAPTION = """\
saved MiB: saved activations on the device at the peak, by the offloader's own count (storages above the threshold)."""
CPU_CAPTION = """\
process MiB: resident memory of the process at its peak. The device is a CPU: it holds the copies in the same memory, so
no memory was saved, and step times say nothing about a GPU."""
DISK_CAPTION = """\
process MiB: resident memory of the process at its peak. The device is a CPU, and moved bytes go to a disk. Step
times say nothing about a GPU."""
DEVICE_CAPTION = """\
peak MiB: all of the device's memory, weights and optimizer included, as torch counts it."""


@dataclass
class RunCost:
    """Memory and time of a few updates in one mode. Figures that are not known are None."""

    mode: str
    step_ms: float | None = None  # median of an update with all of its forward passes
    peak_mib: float | None = None  # of the accelerator
    process_mib: float | None = None  # on a CPU under Linux, largest resident memory
    saved_mib: float | None = None  # most saved activations on the device
    moved_mib: float | None = None  # off the device per update
    host_mib: float | None = None  # that the offloader held
    disk_mib: float | None = None  # likewise, on a disk; None without one
    written_mib: float | None = None  # to that disk per update
    stall_ms: float | None = None  # for which compute waited for copies, per update
    predicted_saved_mib: float | None = None  # by the planner of mode "auto"
    predicted_step_ms: float | None = None  # likewise, for one forward and backward pass
    measured_step_ms: float | None = None  # the offloader's own measurement of its prediction
    compared: str | None = None  # with the first mode, in words
    equal: bool | None = None  # likewise, bit for bit
    failure: str | None = None  # why there are no figures


class StepTimer:
    """Measures updates: `begin()` and `end()` around each one, then `cost()`."""

    def __init__(self, mode: str, device: torch.device, offloader: ActivationOffloader | None) -> None:
        self._mode = mode
        self._device = device
        self._offloader = offloader
        self.restart()

    def restart(self) -> None:
        self._times_ms: list[float] = []
        self._saved_gib: list[float] = []
        self._before = None if self._offloader is None else self._offloader.stats
        reset_peak(self._device)

    def begin(self) -> None:
        self._start = time.perf_counter()

    def end(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._times_ms.append(1e3 * (time.perf_counter() - self._start))
        if self._offloader is not None and (saved_gib := self._offloader.stats.measured_peak_gib) is not None:
            self._saved_gib.append(saved_gib)

    def cost(self) -> RunCost:
        if not self._times_ms:
            return RunCost(self._mode)
        found = RunCost(self._mode, step_ms=median(self._times_ms))
        peak = peak_bytes(self._device)
        peak_mib = None if peak is None else peak / MIB
        if self._device.type == "cpu":
            found.process_mib = peak_mib
        else:
            found.peak_mib = peak_mib
        if self._offloader is not None and self._before is not None:
            now, num_updates = self._offloader.stats, len(self._times_ms)
            found.moved_mib = (now.bytes_moved - self._before.bytes_moved) / num_updates / MIB
            found.stall_ms = (now.stall_ms - self._before.stall_ms) / num_updates
            found.host_mib = now.host_bytes_pinned / MIB
            if now.disk_bytes_written:
                found.disk_mib = now.disk_bytes_held / MIB
                found.written_mib = (now.disk_bytes_written - self._before.disk_bytes_written) / num_updates / MIB
            found.saved_mib = mib(max(self._saved_gib, default=None))
            found.predicted_saved_mib = mib(now.predicted_peak_gib)
            found.predicted_step_ms = now.predicted_step_ms
            found.measured_step_ms = now.measured_step_ms
        return found


def mib(gib: float | None) -> float | None:
    return None if gib is None else 1024 * gib


def table(costs: Sequence[RunCost], device: str) -> str:
    """Return one row per mode, the first the reference of the others; columns without any figure are left out."""
    rows = mode_table([asdict(cost) for cost in costs])
    on_cpu = DISK_CAPTION if any(cost.written_mib for cost in costs) else CPU_CAPTION
    return f"{rows}\n{SAVED_CAPTION}\n{on_cpu if device == 'cpu' else DEVICE_CAPTION}"


def announce(model: nn.Module, options: OffloadOptions, accelerator: Accelerator) -> None:
    is_unused = accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu"
    precision = "fp16, which accelerate computes in float32 on a CPU" if is_unused else accelerator.mixed_precision
    logger.info(
        f"Model: {num_parameters(model):,} parameters on {accelerator.device}, {accelerator.num_processes} "
        f"process(es), mixed precision {precision}"
    )
    if options.offload == "off":
        logger.info("Activation offloading: off (--offload off)")
    elif not options.moves_on(accelerator.device.type):
        logger.warning(
            "Activation offloading: NOTHING WILL BE OFFLOADED. The model runs on the CPU, where saved activations are "
            "in host memory already. --disk FOLDER moves them to a disk; --cpu_copies performs the copies of a GPU, "
            "to try them out"
        )
    else:
        logger.info(
            f"Activation offloading: mode {options.offload}, storages of {options.offload_threshold_mb:g} MiB and more"
        )


def warn_if_nothing_offloaded(cost: RunCost, options: OffloadOptions, device_type: str) -> None:
    """Log why an offloader that could have moved something did not."""
    if cost.moved_mib != 0 or not options.moves_on(device_type):
        return
    reasons = f"no saved storage of --offload_threshold_mb={options.offload_threshold_mb:g} MiB or more was found"
    if cost.mode == "auto":
        reasons += ", or the plan keeps them all: the budget has room for them, or moving them would cost too much time"
    logger.warning(f"NOTHING WAS OFFLOADED: {reasons}")
