"""The neural operator benchmark runs at toy size on the CPU, writes what it promises, and notices wrong gradients."""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Imports a file of benchmarks/, which is no package, as running it as a script would."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which the benchmark sets, and here is taken back
        yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def on_the_cpu(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with a GPU."""
    monkeypatch.setattr(load("neural_operator"), "current_device", lambda: torch.device("cpu"))


@pytest.mark.usefixtures("on_the_cpu")
def test_every_mode_is_compared(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("neural_operator").main(["--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"]
    cells = {cell["mode"]: cell for cell in results["cells"]}
    assert list(cells) == ["plain", "checkpointing", "save_on_cpu", "ours inputs", "ours all", "ours auto"]
    assert all(cells[mode]["gradients_equal"] is True for mode in load("neural_operator_modes").OURS)
    assert cells["ours all"]["moved_bytes"] == cells["plain"]["saved_bytes"]
    assert 0 < cells["ours inputs"]["moved_bytes"] < cells["ours all"]["moved_bytes"]
    assert cells["ours auto"]["offloader_peak_gib"] * 2**30 <= cells["ours auto"]["budget_bytes"]
    assert not any("step_ms" in cell for cell in cells.values())
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_gradient_fails_the_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = load("neural_operator_modes")

    @contextmanager
    def spoil(setting: Any) -> Iterator[Any]:
        def rounded(tensor: Tensor) -> Tensor:
            return tensor * 1.5

        yield modes.Handling(lambda: saved_tensors_hooks(rounded, lambda tensor: tensor))

    monkeypatch.setitem(modes.MODES, "ours all", spoil)
    output = tmp_path / "results.json"
    assert load("neural_operator").main(["--modes", "plain", "ours all", "--output", str(output)]) == 1
    assert [cell["gradients_equal"] for cell in json.loads(output.read_text())["cells"]] == [True, False]


def test_verdicts(load: Any) -> None:
    def cell(mode: str, step_ms: float, peak: int, **more: Any) -> dict[str, Any]:
        return {"mode": mode, "card_gb": None, "nodes": 512, "step_ms": {"median": step_ms}, "peak_bytes": peak, **more}

    report = load("neural_operator_report")
    cells = [cell("plain", 100, 9000), cell("save_on_cpu", 900, 3000), cell("ours all", 500, 3000)]
    cells += [cell("ours inputs", 300, 3050), cell("ours auto", 120, 4000)]
    fitting = {"mode": "ours inputs", "card_gb": 8, "nodes": 512, "batch_size": 16}
    too_large = {**fitting, "mode": "ours all", "error": "OutOfMemoryError: no"}
    results = {"hardware": {"device": "cuda"}, "targets": report.TARGETS, "cells": [*cells, fitting, too_large]}
    assert list(report.verdicts(results)) == [
        "512 x 512, batch 16, on 8 GB: met by ours inputs",
        "512 x 512, save_on_cpu's step / ours at no higher peak: 3.00, ours inputs (target 2: met)",
    ]
    results["cells"] = [too_large, cells[1], cells[2]]
    assert list(report.verdicts(results)) == [
        "512 x 512, batch 16, on 8 GB: missed",
        "512 x 512, save_on_cpu's step / ours at no higher peak: 1.80, ours all (target 2: missed)",
    ]


@pytest.mark.usefixtures("on_the_cpu")
def test_what_the_host_cannot_hold_is_not_tried(load: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--modes", "save_on_cpu", "--host-limit-gib", "0.00001", "--output", str(output)]
    assert load("neural_operator").main(options) == 0
    assert json.loads(output.read_text())["cells"][0]["error"].startswith("not run: needs ")
