"""The LGT benchmark runs at toy size on the CPU, writes what it promises, and tells a lack of memory from a failure."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a file of benchmarks/, which is no package, as running it as a script would."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    AcceleratorState._reset_state(reset_partial_state=True)
    yield importlib.import_module
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def benchmark(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On the CPU also where there is a GPU, all cells in this process."""
    module = load("lgt_memory")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(module, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "in_a_process_of_its_own", lambda cell, options, _: module.outcome(cell, options))
    return module


def test_every_mode_takes_the_same_steps(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"]
    remedy, *cells = results["cells"]
    assert (remedy["num_accumulated"], remedy["mode"]) == (2, "plain")
    assert [cell["mode"] for cell in cells] == ["plain", "checkpointed", "offloaded", "planned"]
    assert all(cell["losses"] == cells[0]["losses"] for cell in cells)
    assert cells[0]["losses"][0] != cells[0]["losses"][1]
    assert not any("step_ms" in cell for cell in cells)
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


def test_a_lack_of_memory_is_a_result_and_another_error_a_failure(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([torch.OutOfMemoryError("no room"), ZeroDivisionError("a fault"), torch.OutOfMemoryError("no room")])

    def fail(*arguments: Any) -> Any:
        raise next(errors)

    monkeypatch.setattr(benchmark, "measure", fail)
    flags = ["--output", str(tmp_path / "results.json"), "--modes", "plain"]
    assert benchmark.main(flags) == 1
    assert benchmark.own_failures(json.loads((tmp_path / "results.json").read_text()))[0]["error"].endswith("a fault")
    monkeypatch.setattr(benchmark, "cells_of", lambda options: [benchmark.REMEDY])
    assert benchmark.main(flags) == 0


def test_after_the_time_limit_no_cell_begins(benchmark: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert benchmark.main(["--time-limit-s=0", "--output", str(output)]) == 0
    assert all(cell["error"].startswith("not run") for cell in json.loads(output.read_text())["cells"])


def test_verdicts(load: Any) -> None:
    def cell(batch_size: int, mode: str, **found: Any) -> dict[str, Any]:
        return {"batch_size": batch_size, "num_steps": 10, "mode": mode, "num_accumulated": 1, **found}

    report = load("lgt_memory_report")
    remedy = {**cell(32, "plain", samples_per_s=100.0, peak_bytes=5 * 2**30), "num_accumulated": 2}
    cells = [remedy, cell(240, "plain", error="OutOfMemoryError: no")]
    cells.append(cell(240, "checkpointed", samples_per_s=120.0, peak_bytes=4 * 2**30))
    assert list(report.verdicts({"cells": cells})) == [
        "batch 240 x 5 steps, claimed 6.8 GB, near the limit: not measured",
        "batch 240 x 10 steps, claimed out of memory: plain does not fit, checkpointed 4.00 GiB",
        "batch 32 x 10 steps, claimed about 5.2 GB: not measured",
        "batch 240 x 10 steps against batch 32 x 10 accumulated twice, samples/s: 1.20, checkpointed (target 1: met)",
    ]
    assert list(report.verdicts({"cells": cells[:2]}))[-1].endswith("target missed, nothing fits")
    assert list(report.verdicts({"cells": cells[1:]}))[-1].endswith("not measured")


@pytest.mark.slow
def test_cells_run_in_processes_of_their_own(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("lgt_memory")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(module, "current_device", lambda: torch.device("cpu"))
    assert module.main(["--modes", "checkpointed", "--output", str(tmp_path / "results.json")]) == 0
    assert len(json.loads((tmp_path / "results.json").read_text())["cells"]) == 2
