import json
import math
from pathlib import Path

import pytest
from torch import nn

from hf_memopt.recipes.common import results
from hf_memopt.recipes.common.results import RunCost


def test_results_hold_dataclasses_as_objects(tmp_path: Path) -> None:
    results.write_results({"training_cost": RunCost("off", step_ms=2.0)}, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["training_cost"]["step_ms"] == 2.0
    assert results.num_parameters(nn.Linear(3, 2)) == 8


def test_a_figure_is_saved_at_the_end(tmp_path: Path) -> None:
    with results.drawn(tmp_path / "figure.png", 1, 2) as (left, right):
        left.plot([1, 2])
        right.bar(["off"], [1])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_entries_are_plotted_where_a_history_has_them(tmp_path: Path) -> None:
    history = [{"update": 1, "loss": 3.0}, {"update": 2, "loss": 2.0, "eval_loss": 2.5}]
    with results.drawn(tmp_path / "figure.png", 1, 1) as axes:
        results.plot_history(axes, history, "update", {"loss": "training", "eval_loss": "held out", "kl": "KL"}, "o-")
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"training": [[1, 3], [2, 2]], "held out": [[2, 2.5]]}


def test_a_missing_figure_is_explained(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level("INFO", "hf_memopt"):
        assert not results.can_draw("losses.png")
    assert "No losses.png: it needs matplotlib" in caplog.text


def test_results_are_json_whatever_the_figures(tmp_path: Path) -> None:
    results.write_results({"history": [{"loss": 0.5, "l2": math.nan, "h1": -math.inf}]}, tmp_path)
    text = (tmp_path / "results.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"history": [{"loss": 0.5, "l2": None, "h1": None}]}
