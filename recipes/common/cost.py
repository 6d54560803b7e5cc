"""What a run of `train_causal_lm.py` cost: measured update by update, as a table, as JSON and as a figure."""

import importlib.util
import json
import logging
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from hf_memopt import ActivationOffloader
from hf_memopt.recipes.causal_lm.data import describe_corpus
from hf_memopt.recipes.common.options import OffloadOptions, Options
from hf_memopt.report.tables import mode_table
from hf_memopt.units import MIB

logger = logging.getLogger(__name__)

SAVED_CAPTION = """\
saved MiB: saved activations on the device at the peak, by the offloader's own count (storages above the threshold)."""
CPU_CAPTION = """\
The device is a CPU: it holds the copies in the same memory, so that nothing was saved, and step times say nothing about
a GPU."""
DEVICE_CAPTION = """\
peak MiB: all of the device's memory, weights and optimizer included, as torch counts it."""


@dataclass
class Cost:
    """Memory and time of a few updates in one mode. Figures that are not known are None.

    Attributes:
        mode: of the offloader, or "off".
        step_ms: median time of an update, all of its forward passes included; None where there was no update.
        peak_mib: largest memory of the accelerator.
        saved_mib: largest amount of saved activations on the device.
        moved_mib: copied to the host per update.
        host_mib: host memory that the offloader held.
        stall_ms: time per update for which compute waited for copies.
        predicted_saved_mib: by the planner of mode "auto".
        predicted_step_ms: likewise, for one forward and backward pass.
        measured_step_ms: the offloader's own measurement of what it predicted.
        losses: of all updates, those before measuring included.
    """

    mode: str
    step_ms: float | None = None
    peak_mib: float | None = None
    saved_mib: float | None = None
    moved_mib: float | None = None
    host_mib: float | None = None
    stall_ms: float | None = None
    predicted_saved_mib: float | None = None
    predicted_step_ms: float | None = None
    measured_step_ms: float | None = None
    losses: list[float] = field(default_factory=list)


class Meter:
    """Measures updates: `begin()` and `end()` around each one, then `cost()`.

    Args:
        mode: how to call the result.
        device: where the model runs.
        offloader: whose counters to read; None in mode "off".
    """

    def __init__(self, mode: str, device: torch.device, offloader: ActivationOffloader | None) -> None:
        self._mode = mode
        self._device = device
        self._offloader = offloader
        self.restart()

    def restart(self) -> None:
        """Forget the updates so far."""
        self._times_ms: list[float] = []
        self._before = None if self._offloader is None else self._offloader.stats
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def begin(self) -> None:
        """Start an update."""
        self._start = time.perf_counter()

    def end(self) -> None:
        """End the update, once the device has finished it."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._times_ms.append(1e3 * (time.perf_counter() - self._start))

    def cost(self) -> Cost:
        """Of the updates since the last restart; nothing is known where there was none."""
        if not self._times_ms:
            return Cost(self._mode)
        found = Cost(self._mode, step_ms=median(self._times_ms))
        if self._device.type != "cpu":
            found.peak_mib = torch.accelerator.max_memory_allocated(self._device) / MIB
        if self._offloader is not None and self._before is not None:
            now, num_updates = self._offloader.stats, len(self._times_ms)
            found.moved_mib = (now.bytes_moved - self._before.bytes_moved) / num_updates / MIB
            found.stall_ms = (now.stall_ms - self._before.stall_ms) / num_updates
            found.host_mib = now.host_bytes_pinned / MIB
            found.saved_mib = _mib(now.measured_peak_gib)
            found.predicted_saved_mib = _mib(now.predicted_peak_gib)
            found.predicted_step_ms = now.predicted_step_ms
            found.measured_step_ms = now.measured_step_ms
        return found


def _mib(gib: float | None) -> float | None:
    return None if gib is None else 1024 * gib


def table(results: dict[str, Any]) -> str:
    """One row per compared mode, or one for the training; columns that no row has a figure for are left out."""
    costs = mode_table([asdict(cost) for cost in shown_costs(results)])
    return f"{costs}\n{SAVED_CAPTION}\n{CPU_CAPTION if results['device'] == 'cpu' else DEVICE_CAPTION}"


def shown_costs(results: dict[str, Any]) -> list[Cost]:
    return results["compared_costs"] or [results["training_cost"]]


def announce(mode: str, num_parameters: int, options: Options, accelerator: Accelerator) -> None:
    """Log what is about to happen, and why nothing will be offloaded where that is known beforehand."""
    logger.info(
        f"Model: {num_parameters:,} parameters on {accelerator.device}, {accelerator.num_processes} process(es), "
        f"mixed precision {accelerator.mixed_precision}"
    )
    if mode == "off":
        logger.info("Activation offloading: off (--offload off)")
    elif accelerator.device.type == "cpu" and not options.offload.cpu_copies:
        logger.warning(
            "Activation offloading: NOTHING WILL BE OFFLOADED. The model runs on the CPU, where saved activations are "
            "in host memory already. --cpu_copies performs the copies all the same, to try them out"
        )
    else:
        logger.info(
            f"Activation offloading: mode {mode}, storages of {options.offload.offload_threshold_mb:g} MiB and more"
        )


def explain_idleness(results: dict[str, Any], options: OffloadOptions) -> None:
    """Log why an offloader that could have moved something did not."""
    cost: Cost = results["training_cost"]
    if cost.moved_mib != 0 or (results["device"] == "cpu" and not options.cpu_copies):
        return
    reasons = f"no saved storage of --offload_threshold_mb={options.offload_threshold_mb:g} MiB or more was found"
    if cost.mode == "auto":
        reasons += ", or the plan keeps them all: the budget has room for them, or moving them would cost too much time"
    logger.warning(f"NOTHING WAS OFFLOADED: {reasons}")


def results(options: Options, accelerator: Accelerator, history: list[dict[str, float]], cost: Cost) -> dict[str, Any]:
    """What a finished training run leaves in `results.json`."""
    device = accelerator.device
    return {
        "mode": options.offload.offload,
        "loop": options.training.loop,
        "corpus": describe_corpus(options.data),
        "device": "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "history": history,
        "final": [entry for entry in history if "eval_loss" in entry][-1],
        "training_cost": cost,
        "compared_costs": [],
    }


def write(results: dict[str, Any], output: Path) -> None:
    """`results.json`, and `results.png` where matplotlib is installed."""
    (output / "results.json").write_text(json.dumps(results, indent=2, default=asdict) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("No results.png: it needs matplotlib, which the extra 'report' installs")
        return
    draw(results, output / "results.png")


def draw(results: dict[str, Any], file: Path) -> None:
    """Losses by update, and memory and time by mode. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    costs = shown_costs(results)
    figure, (learning, memory, speed) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for key, name in (("loss", "training"), ("eval_loss", "held out")):
        points = [(entry["update"], entry[key]) for entry in results["history"] if key in entry]
        learning.plot(*zip(*points, strict=True), "o-" if key == "eval_loss" else "-", label=name)
    learning.set(title=f"Loss, mode {results['mode']}", xlabel="updates", ylabel="nats per token")
    learning.legend()
    modes = [cost.mode for cost in costs]
    on_cpu = results["device"] == "cpu"
    memory.bar(modes, [(cost.saved_mib if on_cpu else cost.peak_mib) or 0 for cost in costs], color="#dd8452")
    memory.set(title="Saved activations on the device" if on_cpu else "Peak memory of the device", ylabel="MiB")
    speed.bar(modes, [cost.step_ms or 0 for cost in costs], color="#4c72b0")
    speed.set(title="Median time of an update" + (" (CPU)" if on_cpu else ""), ylabel="ms")
    for axes in (learning, memory, speed):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)
