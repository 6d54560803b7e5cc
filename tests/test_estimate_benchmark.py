"""The benchmark of estimates runs on a CPU, where it measures nothing and says so."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_the_benchmark_estimates_toys_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "estimate", raising=False)
    estimate = importlib.import_module("estimate")
    output = tmp_path / "results.json"
    estimate.main(["--models", "bert", "--output", str(output)])
    results = json.loads(output.read_text())
    assert results["complete"]
    assert [row["settings"].split(", ")[1] for row in results["rows"]] == [
        "checkpointing none",
        "checkpointing full",
    ] * 2
    assert all(row["estimated_allocated_bytes"] > 0 for row in results["rows"])
    assert results["worst_deviation"] is None
    assert "Nothing was measured" in capsys.readouterr().out
    assert estimate.summarised([{"deviation": -0.04}, {"deviation": 0.01}, {"error": "x"}]) == {
        "worst_deviation": 0.04,
        "median_deviation": 0.025,
    }


@pytest.mark.parametrize(
    "name", ["neural_operator", "lgt", "fluxflow", pytest.param("causal_lm", marks=pytest.mark.slow)]
)
def test_recipes_come_in_three_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "estimate", raising=False)
    estimate = importlib.import_module("estimate")
    sizes = estimate.RECIPES[name]
    assert list(sizes) == ["small", "medium", "large"]
    cells = [
        estimate.recipe_cell(name, size, estimate.write_recipe(name, sizes[size], tmp_path / size)) for size in sizes
    ]
    assert all(cell.step.num_micro_batches == 1 for cell in cells)
