"""The neural operator benchmark runs at toy size on the CPU, writes what it promises, and notices wrong gradients."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@pytest.fixture
def on_the_cpu(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with a GPU."""
    monkeypatch.setattr(load("operators.memory"), "current_device", lambda: torch.device("cpu"))


@pytest.mark.usefixtures("on_the_cpu")
def test_every_mode_is_compared(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("operators.memory").main(["--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"]
    cells = {cell["mode"]: cell for cell in results["cells"]}
    assert list(cells) == [
        "plain",
        "checkpointing",
        "save_on_cpu",
        "ours inputs",
        "ours all",
        "ours auto",
        "plain again",
    ]
    assert all(cells[mode]["gradients_equal"] is True for mode in load("operators.modes").OURS)
    assert cells["ours all"]["moved_bytes"] == cells["plain"]["saved_bytes"]
    assert 0 < cells["ours inputs"]["moved_bytes"] < cells["ours all"]["moved_bytes"]
    assert cells["ours auto"]["offloader_peak_gib"] * 2**30 <= cells["ours auto"]["budget_bytes"]
    assert not any("step_ms" in cell for cell in cells.values())
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_gradient_fails_the_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = load("operators.modes")

    @contextmanager
    def spoil(setting: Any) -> Iterator[Any]:
        def rounded(tensor: Tensor) -> Tensor:
            return tensor * 1.5

        yield modes.Handling(lambda: saved_tensors_hooks(rounded, lambda tensor: tensor))

    monkeypatch.setitem(modes.MODES, "ours all", spoil)
    output = tmp_path / "results.json"
    assert load("operators.memory").main(["--modes", "plain", "ours all", "--output", str(output)]) == 1
    assert [cell["gradients_equal"] for cell in json.loads(output.read_text())["cells"]] == [True, False]


def test_verdicts(load: Any) -> None:
    def cell(mode: str, step_ms: float, peak: int, **more: Any) -> dict[str, Any]:
        return {"mode": mode, "card_gb": None, "nodes": 512, "step_ms": {"median": step_ms}, "peak_bytes": peak, **more}

    report = load("operators.report")
    cells = [cell("plain", 100, 9000), cell("save_on_cpu", 900, 3000), cell("ours all", 500, 3000)]
    cells += [cell("ours inputs", 300, 3050), cell("ours auto", 120, 4000)]
    fitting = {"mode": "ours inputs", "card_gb": 8, "nodes": 512, "batch_size": 16}
    too_large = {**fitting, "mode": "ours all", "error": "OutOfMemoryError: no"}
    results = {"hardware": {"device": "cuda"}, "targets": report.TARGETS, "cells": [*cells, fitting, too_large]}
    assert [str(verdict) for verdict in report.verdicts(results)] == [
        "512 x 512, batch 16, on 8 GB, modes of ours that fit (ours inputs): 1 (target 1: met)",
        "512 x 512, save_on_cpu's step / ours at no higher peak, ours inputs: 3 (target 2: met)",
    ]
    results["cells"] = [too_large, cells[1], cells[2]]
    assert [str(verdict) for verdict in report.verdicts(results)] == [
        "512 x 512, batch 16, on 8 GB, modes of ours that fit: 0 (target 1: missed)",
        "512 x 512, save_on_cpu's step / ours at no higher peak, ours all: 1.8 (target 2: missed)",
    ]
    results["cells"] = [{**too_large, "error": "not run: the time limit was reached"}]
    assert {verdict.outcome for verdict in report.verdicts(results)} == {"not measured"}


def test_no_larger_batch_than_one_that_does_not_fit_is_tried(load: Any) -> None:
    pointless = load("operators.memory").pointless
    cell = {"card_gb": 8, "mode": "plain", "batch_size": 8}
    assert pointless({**cell, "batch_size": 16}, [{**cell, "error": "OutOfMemoryError: no"}])
    assert pointless({**cell, "batch_size": 16}, [cell]) is None
    assert pointless({**cell, "mode": "ours all"}, [{**cell, "error": "OutOfMemoryError: no"}]) is None


@pytest.mark.usefixtures("on_the_cpu")
def test_what_the_host_cannot_hold_is_not_tried(load: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--modes", "save_on_cpu", "--host-limit-gib", "0.00001", "--output", str(output)]
    assert load("operators.memory").main(options) == 0
    assert json.loads(output.read_text())["cells"][0]["error"].startswith("not run: needs ")
