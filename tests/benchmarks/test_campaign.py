"""The campaign: what it runs and in which order, what a kill costs, and a rehearsal of all of it at toy size."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import BENCHMARKS, Load
from patience import HANG_S

CUDA = torch.device("cuda", 0)
REHEARSAL = [sys.executable, "-m", "benchmarks.campaign", "--dry-run", f"--minutes={HANG_S / 60}"]


@pytest.fixture(scope="module")
def cells(load: Load) -> list[Any]:
    """On an H100."""
    estimates = BENCHMARKS / "results" / "estimates-h100.json"
    cells: list[Any] = load("campaign.cells").all_cells(CUDA, toy=False, card="h100", estimates=estimates)
    return cells


def rehearse(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*REHEARSAL, "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent, check=False)


def entries_of(output: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((output / "campaign.json").read_text())["entries"]
    return entries


def test_every_workload_has_cells_and_the_headlines_come_first(cells: list[Any]) -> None:
    assert len({cell.title for cell in cells}) == len(cells)
    benchmarks = list(dict.fromkeys(cell.benchmark for cell in cells))
    assert benchmarks[:2] == ["activations.offload", "teacher.offload"]
    assert {"activations.longest", "operators.memory", "lgt.memory", "fluxflow.memory"} < set(benchmarks)
    assert {"planning.estimate", "planning.cache_clearing"} < set(benchmarks)
    first = [cell.settings["mode"] for cell in cells if cell.benchmark == "activations.offload"]
    assert first.index("TRL") < first.index("ours auto 10 %")
    assert "none again" in first


def test_every_cell_has_its_cost(cells: list[Any], load: Load) -> None:
    costs = load("campaign.costs")
    for cell in cells:
        for machine in costs.REFERENCES:
            assert 1 < costs.cost_of(cell).seconds(machine) < 900, cell.title
            assert math.isfinite(costs.cost_of(cell).device_bytes)


def test_arithmetic_of_32768_tokens(load: Load) -> None:
    """42.3 GB saved by six layers, 47 with weights and gradients; all of it page-locked where a plan is recorded."""
    costs = load("campaign.costs")
    settings = {"num_tokens": 32768, "layers": 6, "link_divisor": 1, "warmup": 2, "steps": 5}
    plain = costs.activations({**settings, "mode": "none"})
    planned = costs.activations({**settings, "mode": "ours auto 20 %"})
    assert plain.device_bytes == pytest.approx(51e9, rel=0.02)
    assert plain.pinned_bytes == 0
    assert planned.pinned_bytes == pytest.approx(42.3e9, rel=0.01)
    assert plain.half_flop / costs.REFERENCES[0].half_flops == pytest.approx(0.92, rel=0.15)


def test_parts_are_all_cells_without_repetition(cells: list[Any], load: Load) -> None:
    part_of = load("campaign.__main__").part_of
    parts = [part_of(cells, (number, 3)) for number in (1, 2, 3)]
    assert [cell for part in parts for cell in part] == cells
    assert all(parts)


def test_the_plan_is_printed_for_two_cards(cells: list[Any], load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("campaign.__main__").print_plan(cells)
    printed = capsys.readouterr().out
    assert "s, h100" in printed
    assert "s, rtx4090" in printed
    assert "cells do not fit its memory" in printed


def test_seconds_are_learnt_from_cells_that_ran(load: Load, tmp_path: Path) -> None:
    record, cell = load("campaign.record").Record(tmp_path), load("cells").Cell
    assert record.slowness("common") == 1
    record.add(cell("activations.offload", "a", {"mode": "none", "num_tokens": 1}), {}, predicted_s=10, seconds=20)
    record.add(cell("activations.offload", "b", {"mode": "none", "num_tokens": 1}), {"error": "not run: x"}, 10, 0)
    assert record.slowness("activations.offload") == record.slowness("lgt.memory") == 2


def test_resuming_takes_over_what_was_finished(load: Load, tmp_path: Path) -> None:
    record_of, cell = load("campaign.record").Record, load("cells").Cell
    settings = {"mode": "none", "num_tokens": 1, "link_divisor": 1}
    record = record_of(tmp_path / "first", facts={"commit": "abc"})
    record.add(cell("activations.offload", "done", settings), {"saved_bytes": 3}, 1, 1)
    record.add(cell("activations.offload", "no room", settings), {"error": "OutOfMemoryError: no"}, 1, 1)
    record.add(cell("activations.offload", "no time", settings), {"error": "not run: no time"}, 1, 1)
    again = record_of.resumed(tmp_path / "second", tmp_path / "first")
    assert list(again.entries) == ["activations.offload: done", "activations.offload: no room"]
    assert again.facts == {"commit": "abc"}
    with pytest.raises(ValueError, match=r"--resume=.*nowhere has no campaign.json; give the --output"):
        record_of.resumed(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"commit": "def"}, "commit abc then, def now"),
        ({"hardware": {"name": "NVIDIA T4"}}, "device NVIDIA H100 then, NVIDIA T4 now"),
        ({"versions": {"torch": "2.12"}}, r"versions \{'torch': '2.11'\} then"),
    ],
)
def test_rows_of_another_machine_or_commit_are_not_mixed(
    load: Load, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    facts = {"hardware": {"name": "NVIDIA H100"}, "commit": "abc", "versions": {"torch": "2.11"}, "date": "2026-11-21"}
    record = load("campaign.record").Record(tmp_path, facts=facts)
    record.continue_on(facts | {"date": "2026-11-22"})
    assert record.facts["date"] == "2026-11-22"
    with pytest.raises(ValueError, match=message):
        record.continue_on(facts | other)


def test_a_benchmarks_own_file_is_written(load: Load, tmp_path: Path) -> None:
    record = load("campaign.record").Record(tmp_path, facts={"commit": "abc"})
    settings = {"mode": "none", "num_tokens": 1, "link_divisor": 1}
    record.add(load("cells").Cell("activations.offload", "plain", settings), {"gradient_digest": "x"}, 1, 1)
    results = json.loads((tmp_path / "activations.offload.json").read_text())
    assert results["benchmark"] == "activations.offload"
    assert results["cells"] == [{**settings, "gradient_digest": "x", "gradients_equal": True}]
    assert results["complete"]


def test_a_part_is_named_rightly(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(SystemExit):
            load("campaign.__main__").parse(["--part", text])
        assert "is not K/N with 1 <= K <= N, such as 2/3" in capsys.readouterr().err


def test_a_process_that_is_killed_is_a_result(tmp_path: Path) -> None:
    """Another that takes too long is killed itself."""
    program = """
import json, os, signal, sys, threading, time
from pathlib import Path
import psutil
from benchmarks.cells import Cell, isolated

def kill() -> None:
    while True:
        for process in psutil.Process().children(recursive=True):
            if process.name() and "forkserver" in " ".join(process.cmdline()):
                for child in process.children():
                    child.kill()
                    return

threading.Thread(target=kill, daemon=True).start()
killed = isolated(Cell("common", "killed", {}), Path(sys.argv[1]), 600)
late = isolated(Cell("common", "late", {}), Path(sys.argv[1]), 0.001)
print(json.dumps([killed, late, len(psutil.Process().children(recursive=True))]))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent, check=True)
    killed, late, num_processes = json.loads(run.stdout.splitlines()[-1])
    assert killed["error"].startswith("process ended with -9")
    assert late["error"].startswith("not finished: took longer than the 0 s that were left")
    assert num_processes == 2  # multiprocessing's server and its tracker


def test_what_is_missing_is_named(load: Load, tmp_path: Path) -> None:
    cells = load("cells")
    row = cells.found_by(cells.Cell("common", "facts", {}, needs=("a_package", "torch")), tmp_path, 60)
    assert row == {"error": "not run: a_package is not installed"}
    assert cells.found_by(cells.Cell("common", "facts", {}), tmp_path, 0) == {
        "error": "not run: the time limit was reached"
    }


def test_only_cells_that_ran_fail(load: Load, tmp_path: Path) -> None:
    record, cell = load("campaign.record").Record(tmp_path), load("cells").Cell
    settings = {"mode": "none", "num_tokens": 1, "link_divisor": 1}
    for title, found in {"done": {}, "no time": {"error": "not run: x"}, "broken": {"error": "KeyError: x"}}.items():
        record.add(cell("activations.offload", title, settings), found, 1, 1)
    assert record.failures() == ["activations.offload: broken"]


@pytest.mark.parametrize(("part", "num_before_kill"), [("1/40", 2), pytest.param("1/1", 4, marks=pytest.mark.slow)])
def test_rehearsal_is_killed_and_goes_on(tmp_path: Path, part: str, num_before_kill: int) -> None:
    """At toy size; the kill comes after some cells, which are not measured again."""
    first = tmp_path / "first"
    process = subprocess.Popen(
        [*REHEARSAL, "--part", part, "--output", str(first)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=BENCHMARKS.parent,
        start_new_session=True,
    )
    begun = time.monotonic()
    while not (first / "campaign.json").is_file() or len(entries_of(first)) < num_before_kill:
        assert process.poll() is None
        assert time.monotonic() - begun < HANG_S
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = entries_of(first)
    run = rehearse(tmp_path / "second", "--part", part, "--resume", str(first))
    assert run.returncode == 0, run.stderr
    entries = entries_of(tmp_path / "second")
    finished = {title: entry for title, entry in kept.items() if not entry["found"].get("error", "").startswith("not")}
    assert len(finished) >= num_before_kill - 1
    assert finished.items() <= entries.items()
    expected = {"needs an accelerator", "is not installed", "is measured"}
    for title, entry in entries.items():
        error = entry["found"].get("error")
        assert error is None or any(reason in error for reason in expected), (title, error)
    assert len(entries) > (30 if part == "1/1" else num_before_kill)
    assert "not measured" in run.stdout
    assert all(title in run.stdout for title in entries)
