"""The LGT benchmark runs at toy size on the CPU, writes what it promises, and tells a lack of memory from a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_runs import BENCHMARKS, NO_LIMIT

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def benchmark(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On the CPU also where there is a GPU."""
    module = load("lgt.memory")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(module, "current_device", lambda: torch.device("cpu"))
    return module


def run(benchmark: Any, output: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    assert benchmark.main([NO_LIMIT, "--output", str(output), *options]) == status
    results = json.loads(output.read_text())
    assert results["complete"]
    return results["cells"]


def test_every_mode_takes_the_same_steps(benchmark: Any, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remedy, *cells = run(benchmark, output)
    assert (remedy["num_accumulated"], remedy["mode"]) == (2, "plain")
    assert [cell["mode"] for cell in cells] == ["plain", "checkpointed", "offloaded", "planned", "plain again"]
    assert all(cell["losses"] == cells[0]["losses"] for cell in cells)
    assert all(cell["losses_equal"] is True for cell in [remedy, *cells])
    assert cells[0]["losses"][0] != cells[0]["losses"][1]
    assert [cell["mode"] for cell in cells if "moved_bytes" in cell] == ["offloaded"]
    assert not any("step_ms" in cell for cell in cells)
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


def test_losses_are_those_of_a_start_that_timed_steps_have_not_moved(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"batch_size": 2, "num_steps": 1, "mode": "plain", "num_accumulated": 1, "size": "toy"}
    settings |= {"card_gb": None, "steps": 2, "seconds_per_cell": 1.0}
    determinism: list[bool] = []

    def timed(step: Any, device: Any, **limits: Any) -> dict[str, Any]:
        determinism.append(torch.are_deterministic_algorithms_enabled())
        for _ in range(num_timed):
            step()
        return {}

    take = benchmark.train_step

    def train_step(*arguments: Any, **options: Any) -> Any:
        determinism.append(torch.are_deterministic_algorithms_enabled())
        return take(*arguments, **options)

    monkeypatch.setattr(benchmark, "timed", timed)
    monkeypatch.setattr(benchmark, "train_step", train_step)
    num_timed = 0
    losses = benchmark.measure(settings, tmp_path)["losses"]
    assert determinism == [False] * 3 + [True] * 2
    num_timed = 3
    assert benchmark.measure(settings, tmp_path)["losses"] == losses


def test_losses_are_compared_with_the_plain_ones_of_the_same_size(load: Any) -> None:
    def row(mode: str, loss: float | None, num_steps: int = 5) -> dict[str, Any]:
        found = {"error": "OutOfMemoryError: no"} if loss is None else {"losses": [loss]}
        return {"batch_size": 2, "num_steps": num_steps, "num_accumulated": 1, "mode": mode, **found}

    rows = [row("plain", 1.0), row("offloaded", 1.0), row("planned", 2.0), row("plain again", 1.0)]
    rows += [row("plain", None, 10), row("checkpointed", 3.0, 10), row("offloaded", 4.0, 10), row("offloaded", 1.0, 20)]
    load("lgt.memory").judge(rows)
    assert [each.get("losses_equal") for each in rows] == [True, True, False, True, None, True, False, None]


def test_other_losses_fail_the_run(benchmark: Any, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        benchmark, "measure", lambda settings, folder: {"losses": [float(settings["mode"] == "offloaded")]}
    )
    run(benchmark, output, "--modes", "plain", "checkpointed")
    cells = run(benchmark, output, "--modes", "plain", "offloaded", status=1)
    assert [cell["losses_equal"] for cell in cells] == [True, True, False, True]


def test_a_lack_of_memory_is_a_result_and_another_error_a_failure(
    benchmark: Any, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room, fault = torch.OutOfMemoryError("no room"), ZeroDivisionError("a fault")

    def fail_with(*errors: Exception) -> None:
        left = iter(errors)

        def fail(settings: Any, folder: Path) -> Any:
            raise next(left)

        monkeypatch.setattr(benchmark, "measure", fail)

    fail_with(no_room, fault)
    cells = run(benchmark, output, "--modes", "checkpointed", status=1)
    assert [cell["error"] for cell in cells] == ["OutOfMemoryError: no room", "ZeroDivisionError: a fault"]
    fail_with(no_room, no_room)
    run(benchmark, output, "--modes", "checkpointed")


def test_after_the_time_limit_no_cell_begins(benchmark: Any, output: Path) -> None:
    cells = run(benchmark, output, "--time-limit-s=0")
    assert all(cell["error"].startswith("not run") for cell in cells)


def test_a_plan_is_for_the_card_that_runs_with_the_emulated_memory(load: Any) -> None:
    benchmark, cards = load("lgt.memory"), load("lgt.memory").CARDS
    card = benchmark.emulated_card(GPU, 8.0)
    assert card.link_bytes_per_s == cards["h100"].link_bytes_per_s
    assert card.half_flops == cards["h100"].half_flops
    room_bytes = card.memory_bytes - sum(benchmark.allowances(card).values())
    assert room_bytes == load("common").usable_bytes(8.0)
    assert benchmark.emulated_card(None, None).link_bytes_per_s == cards["rtx4070"].link_bytes_per_s


@pytest.mark.parametrize("gpu", ["NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4070 Ti", "NVIDIA T400"])
def test_a_plan_for_an_unknown_card_is_not_made(
    load: Any, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("lgt.memory"), "present_gpu", lambda: gpu)
    settings = {"batch_size": 2, "num_steps": 1, "mode": "planned", "num_accumulated": 1, "size": "toy"}
    cell = load("cells").Cell("lgt.memory", "planned", {**settings, "card_gb": 8.0})
    row = load("cells").in_this_process(cell, tmp_path, 60.0)
    assert row["error"].startswith(f"not run: '{gpu}' is none of the cards")


def test_the_plan_is_made_before_anything_touches_the_device(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    accelerator = benchmark.Accelerator

    def noted(name: str, then: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return then(*arguments, **options)

        return call

    asked_here: list[int] = []

    def present_gpu() -> str:
        asked_here.append(os.getpid())
        return GPU

    monkeypatch.setattr(benchmark, "present_gpu", present_gpu)
    plain = SimpleNamespace(settings={"mixed_precision": "bf16", "activations": "kept"}, micro_batch=2)

    def plan(workload: Any, gpu: Any, progress: bool) -> Any:
        assert gpu.name == "h100"
        return SimpleNamespace(best=plain)

    monkeypatch.setattr(benchmark, "plan", noted("plan", plan))
    monkeypatch.setattr(benchmark, "limit_memory", noted("limit", lambda card_gb: None))
    monkeypatch.setattr(benchmark, "Accelerator", noted("accelerator", accelerator))
    settings = {"batch_size": 2, "num_steps": 1, "mode": "planned", "num_accumulated": 1, "size": "toy"}
    settings |= {"card_gb": 8.0, "steps": 1, "seconds_per_cell": 1.0}
    benchmark.measure(settings, tmp_path)
    assert calls == ["plan", "accelerator", "limit"]
    assert asked_here == []  # it was asked in another process


def test_verdicts_and_claims(load: Any) -> None:
    def cell(batch_size: int, mode: str, **found: Any) -> dict[str, Any]:
        return {"batch_size": batch_size, "num_steps": 10, "mode": mode, "num_accumulated": 1, **found}

    report = load("lgt.report")

    def outcome(cells: list[dict[str, Any]]) -> tuple[float | None, str]:
        (verdict,) = report.verdicts({"cells": cells, "targets": report.TARGETS})
        return verdict.value, verdict.outcome

    remedy = {**cell(32, "plain", samples_per_s=100.0, peak_bytes=5 * 2**30), "num_accumulated": 2}
    cells = [remedy, cell(240, "plain", error="OutOfMemoryError: no")]
    cells.append(cell(240, "checkpointed", samples_per_s=120.0, peak_bytes=4 * 2**30))
    assert list(report.claims(cells)) == [
        "batch 240 x 5 steps, claimed 6.8 GB, near the limit: not measured",
        "batch 240 x 10 steps, claimed out of memory: plain does not fit, checkpointed 4.00 GiB",
        "batch 32 x 10 steps, claimed about 5.2 GB: not measured",
    ]
    assert outcome(cells) == (1.2, "met")
    assert outcome(cells[:2]) == (0.0, "missed")
    assert outcome(cells[:1]) == (None, "not measured")
    assert outcome(cells[1:]) == (None, "not measured")
    assert outcome([remedy, cell(240, "plain", error="not run: no time")]) == (None, "not measured")
    assert outcome([]) == (None, "not measured")


def test_the_report_shows_what_failed(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"batch_size": 2, "num_steps": 5, "mode": mode, "num_accumulated": 1, "error": error}
        for mode, error in [("plain", "OutOfMemoryError: no"), ("planned", "not run: no card\nat all")]
    ]
    rows.append({**rows[0], "mode": "offloaded", "losses": [0.5], "losses_equal": False})
    del rows[-1]["error"]
    report = load("lgt.report")
    report.print_report({"cells": rows, "targets": report.TARGETS, "hardware": {"device": "cuda"}})
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "2 x 5, planned: not run: no card" in printed
    assert "different" in printed


@pytest.mark.slow
def test_cells_run_in_processes_of_their_own(output: Path) -> None:
    """Which fork others, where they plan."""
    options = ["--modes", "planned", "--steps", "1", "--output", str(output)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.lgt.memory", *options, NO_LIMIT],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == 0
    cells = json.loads(output.read_text())["cells"]
    assert [cell["mode"] for cell in cells if "losses" in cell] == ["plain", "planned"]
