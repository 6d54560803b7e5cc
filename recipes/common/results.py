"""The results of a finished run: `results.json`, and figures where matplotlib is installed."""

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

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
