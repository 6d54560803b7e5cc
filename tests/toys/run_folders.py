"""Folders as runs leave them behind, for reports."""

import json
from pathlib import Path
from typing import Any

import torch
from counted_allocator import FakeCounters

from hf_memopt.memory import MemoryTracker
from hf_memopt.memory.logger import memory_metrics
from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics

MIB, GIB = 2**20, 2**30


PNG = b"\x89PNG\r\n\x1a\n"


# As the reflow demo writes it.
HOLDERS = {
    "resident": {
        "teacher": {"weights": 2 * MIB, "teacher": 3 * MIB},
        "backward": {"weights": 2 * MIB, "saved": 6 * MIB},
    },
    "swapped": {
        "teacher": {"weights": 2 * MIB, "teacher": 3 * MIB},
        "backward": {"weights": 2 * MIB, "saved": 4 * MIB},
    },
}


EVALUATION = {
    "num_observations": 12,
    "teacher": {"error": {"1": 0.5, "10": 0.0}, "latency_ms": {"1": 7.0, "10": 30.0}},
    "student": {"error": {"1": 0.25, "2": 0.125}, "latency_ms": {"1": 7.5}},
}


def demo_run(folder: Path) -> Path:
    write_json(folder / "results.json", {"seed": 0, "memory_bytes": HOLDERS, "evaluation": EVALUATION})
    return folder


def causal_lm_run(folder: Path) -> Path:
    """Write the fields of `Cost`, as `train_causal_lm` does."""
    costs: list[dict[str, Any]] = [
        {"mode": "off", "step_ms": 50.0, "peak_mib": None, "saved_mib": 100.0, "compared": "reference"},
        {
            "mode": "<all>",
            "step_ms": 75.0,
            "peak_mib": None,
            "saved_mib": 25.0,
            "moved_mib": 80.5,
            "compared": "equal, bit for bit",
            "equal": True,
        },
        {
            "mode": "auto",
            "step_ms": 60.0,
            "saved_mib": 50.0,
            "predicted_saved_mib": 50.0,
            "compared": "different, not by rounding",
            "equal": False,
        },
    ]
    results = {
        "mode": "auto",
        "device": "cpu",
        "versions": {"torch": "2.11.0"},
        "history": [{"update": 1, "loss": 2.0}],
    }
    write_json(folder / "results.json", {**results, "training_cost": costs[2]})
    write_json(folder / "comparison.json", {"recipe": "train_causal_lm", "device": "cpu", "modes": costs})
    (folder / "results.png").write_bytes(PNG + b"drawn by the recipe")
    return folder


def logged_run(folder: Path) -> Path:
    """Track twenty steps, every fifth logged; the peak is in backward, the others are bounds."""
    counters = FakeCounters(total_bytes=80 * GIB)
    counters.elsewhere_bytes = GIB
    tracker = MemoryTracker(torch.device("cpu"), counters=counters)
    counters.move(4 * GIB)
    for step in range(1, 21):
        with tracker.phase("forward"):
            counters.move(2 * GIB)
        with tracker.phase("backward"):
            counters.move(3 * GIB)
            counters.move(-5 * GIB)
        tracker.step()
        if step % 5 == 0:
            append_metrics(folder / METRICS_FILE, step, memory_metrics(tracker, tracker.read()))
    return folder


RUNS = {"demo": demo_run, "causal_lm": causal_lm_run, "logged": logged_run}


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
