"""Folders as runs leave them behind, for reports."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from counted_allocator import FakeCounters

from hf_memopt.activations import OffloadStats
from hf_memopt.memory import MemoryTracker
from hf_memopt.memory.logger import METRICS_FILE, append_metrics, memory_metrics
from hf_memopt.report.offloading import HeldOverPass, OffloadingRecord, PlanTable

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
    """Track twenty steps, every fifth logged; the peak is in backward, the others are bounds. The first hold less."""
    counters = FakeCounters(total_bytes=80 * GIB)
    counters.elsewhere_bytes = GIB
    tracker = MemoryTracker(torch.device("cpu"), counters=counters)
    counters.move(3 * GIB)
    for step in range(1, 21):
        if step == 6:
            counters.move(GIB)
        with tracker.phase("forward"):
            counters.move(2 * GIB)
        with tracker.phase("backward"):
            counters.move(3 * GIB)
            counters.move(-5 * GIB)
        tracker.step()
        if step % 5 == 0:
            append_metrics(folder / METRICS_FILE, step, memory_metrics(tracker, tracker.read()))
    return folder


def offloaded_run(folder: Path) -> Path:
    """Write the record of a Trainer's offloader, of a step with two saves and two uses."""
    counts = dict.fromkeys((field.name for field in fields(OffloadStats)), 0)
    gib = {"predicted_peak_gib": 1.5 / 1024, "measured_peak_gib": 1.5 / 1024, "plain_peak_gib": 4 / 1024}
    times = {"stall_ms": 3.25, "predicted_step_ms": 12.0, "measured_step_ms": None}
    record = OffloadingRecord(
        facts={"device": "Some GPU", "peak memory": "7.25 GiB allocated, in backward; 9.50 GiB reserved"},
        stats=OffloadStats(**{**counts, "bytes_moved": 30 * MIB, **gib, **times}),
        plans=[PlanTable("saved activations: 1.00 MiB kept", [("model.layers.*.mlp", MIB, 2 * MIB, 0)])],
        note="",
        over_pass=HeldOverPass([MIB, MIB, 3 * MIB // 2, 0], [2 * MIB, 4 * MIB, 4 * MIB, 0], 2),
        weights=["base: 2.00 GiB streamed"],
    )
    record.write(folder)
    return folder


RUNS = {"demo": demo_run, "causal_lm": causal_lm_run, "logged": logged_run, "offloaded": offloaded_run}


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
