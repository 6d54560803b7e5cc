"""The benchmark of estimates: on a CPU it measures nothing and says so, and its estimates can be kept for a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import Load

BERT = ["--models", "bert", "--recipes"]
FIGURES = {"allocated_bytes": 110, "reserved_bytes": 240, "step_ms": 3.0}
MEASURED = {"measured_allocated_bytes": 100, "measured_reserved_bytes": 300, "step_ms": {"median": 2.0}}


@pytest.fixture
def estimated(load: Load, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Estimates cost nothing; the names of the steps that were estimated."""
    names: list[str] = []

    def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        names.append(settings["step"])
        return {"estimate": FIGURES}

    monkeypatch.setattr(load("planning.estimates"), "measure", measure)
    return names


@pytest.fixture
def estimate_only(load: Load, output: Path) -> Callable[..., int]:
    """Keeps estimates of toys in a file."""
    return lambda *arguments: load("planning.estimate").main(
        [*arguments, "--estimate-only", "--sizes", "toy", "--estimates", str(output)]
    )


def steps_of(output: Path) -> list[str]:
    return [row["step"] for row in json.loads(output.read_text())["cells"]]


def test_the_benchmark_estimates_toys_on_a_cpu(load: Load, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("planning.estimate").main([*BERT, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["complete"]
    assert [row["step"].split(", ")[2] for row in results["cells"]] == ["checkpointing none", "checkpointing full"] * 2
    for row in results["cells"]:
        assert row["estimate"]["reserved_bytes"] >= row["estimate"]["allocated_bytes"] > 0
        assert row["estimate"]["step_ms"] > 0
        assert not {"deviation", "measured_allocated_bytes", "step_ms"} & row.keys()
    assert {verdict.outcome for verdict in load("planning.estimate").REPORT.verdicts(results)} == {"not measured"}
    assert "nothing was measured" in capsys.readouterr().out


def test_estimates_are_kept_for_a_card(estimate_only: Callable[..., int], estimated: list[str], output: Path) -> None:
    assert estimate_only(*BERT) == 0
    results = json.loads(output.read_text())
    assert results["card"] == "h100"
    assert results["hardware"]["device"] == "cpu"
    assert results["complete"]
    assert {row["card"] for row in results["cells"]} == {"h100"}
    assert [row["step"] for row in results["cells"]] == estimated


def test_a_file_of_estimates_is_continued(
    estimate_only: Callable[..., int], estimated: list[str], output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is missing, what failed, and what is defined in another way now."""
    estimate_only(*BERT)
    results = json.loads(output.read_text())
    results["cells"][1]["definition"]["seq_len"] += 1
    results["cells"][2] = {name: results["cells"][2][name] for name in ("step", "definition", "card")} | {"error": "x"}
    output.write_text(json.dumps(results))
    first = list(estimated)
    estimated.clear()
    assert estimate_only("--models", "bert", "vit", "--recipes") == 0
    assert estimated[:2] == first[1:3]
    assert [name.split()[0] for name in estimated[2:]] == ["vit"] * 4
    assert f"{first[1]}: has changed" in capsys.readouterr().out
    assert sorted(steps_of(output)) == sorted({*first, *estimated})
    estimated.clear()
    assert estimate_only(*BERT) == 0
    assert estimated == []
    assert len(steps_of(output)) == 8


def test_each_estimate_is_written_when_it_is_done(
    load: Load, estimate_only: Callable[..., int], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        if "full" in settings["step"]:
            raise KeyboardInterrupt
        return {"estimate": FIGURES}

    monkeypatch.setattr(load("planning.estimates"), "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        estimate_only(*BERT)
    results = json.loads(output.read_text())
    assert len(results["cells"]) == 1
    assert not results["complete"]


def test_kept_estimates_are_not_computed_again(
    load: Load, estimate_only: Callable[..., int], estimated: list[str], output: Path, tmp_path: Path
) -> None:
    estimate_only(*BERT)
    estimated.clear()
    found = tmp_path / "found.json"
    assert load("planning.estimate").main([*BERT, "--estimates", str(output), "--output", str(found)]) == 0
    assert estimated == []
    assert [row["estimate"] for row in json.loads(found.read_text())["cells"]] == [FIGURES] * 4


def test_kept_estimates_of_a_step_that_failed_fail_its_row(
    load: Load, estimate_only: Callable[..., int], estimated: list[str], output: Path, tmp_path: Path
) -> None:
    estimate_only(*BERT)
    results = json.loads(output.read_text())
    del results["cells"][0]["estimate"]
    results["cells"][0]["error"] = "ValueError: no such operation"
    output.write_text(json.dumps(results))
    found = tmp_path / "found.json"
    assert load("planning.estimate").main([*BERT, "--estimates", str(output), "--output", str(found)]) == 1
    rows = json.loads(found.read_text())["cells"]
    assert "not estimated: ValueError: no such operation" in rows[0]["error"]
    assert not any("error" in row for row in rows[1:])


@pytest.mark.parametrize("stage", [[], ["--estimate-only"]], ids=["measuring", "estimating"])
def test_estimates_of_another_card_are_refused(
    stage: list[str],
    load: Load,
    estimate_only: Callable[..., int],
    estimated: list[str],
    output: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate_only(*BERT)
    before = output.read_text()
    assert load("planning.estimate").main([*BERT, *stage, "--card", "rtx4090", "--estimates", str(output)]) == 2
    assert "holds estimates for h100, and this run is for rtx4090" in capsys.readouterr().err
    assert output.read_text() == before


def test_measuring_refuses_estimates_of_other_steps(
    load: Load,
    estimate_only: Callable[..., int],
    estimated: list[str],
    output: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such as those of a commit with other models or sizes."""
    estimate_only(*BERT)
    results = json.loads(output.read_text())
    results["cells"][0]["definition"]["batch_size"] += 1
    output.write_text(json.dumps(results))
    arguments = ["--models", "bert", "vit", "--recipes", "--estimates", str(output)]
    assert load("planning.estimate").main(arguments) == 2
    error = capsys.readouterr().err
    assert "these 5 steps as they are defined now: bert toy, precision no, checkpointing none; vit toy" in error
    assert f"--estimate-only --card h100 --estimates {output}" in error


def test_results_are_no_estimates(
    load: Load, estimated: list[str], output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_text(json.dumps({"benchmark": "planning.estimate", "cells": []}))
    assert load("planning.estimate").main([*BERT, "--estimates", str(output)]) == 2
    assert "holds no estimates" in capsys.readouterr().err


def test_cells_on_a_gpu(load: Load) -> None:
    """Steps in bfloat16 run also without cuDNN's attention, and the first step once more at the end."""
    estimate = load("planning.estimate")
    options = estimate.parse(["--models", "qwen3", "--sizes", "small", "--card", "h100"], torch.device("cuda", 0))
    cells = list(estimate.cells(options))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 4 + 2 + 4 + 1
    assert names[-1] == f"{names[0]} again"
    last = [cell for cell in cells if cell.environ]
    assert [cell.name for cell in last] == [
        f"qwen3 small, precision bf16, checkpointing {way}, cuDNN attention last" for way in ("none", "full")
    ]
    assert {tuple(cell.environ.items()) for cell in last} == {(("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),)}
    assert all(json.loads(json.dumps(cell.settings)) == cell.settings for cell in cells)


def test_cells_of_the_same_step_share_its_estimate(load: Load, estimated: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert load("planning.estimates").shared({"step": "bert toy, bf16"}, tmp_path) == {"estimate": FIGURES}
    assert estimated == ["bert toy, bf16"]


def test_deviations_are_of_what_was_measured(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    estimate, report = load("planning.estimate"), load("planning.estimate_report")
    shared = {"step": "bert", "card": "h100", "cudnn_last": False, "again": False, "estimate": FIGURES}
    found = {**shared, **MEASURED}
    found |= estimate.deviations(found)
    assert [round(found[name], 6) for name in report.QUANTITIES] == [0.1, -0.2, 0.5]
    rows = [found, {**found, "deviation": -0.02}, {**shared, "error": "OutOfMemoryError: x"}, {**found, "again": True}]
    estimate.judge(rows)
    assert [row.get("same_bytes") for row in rows] == [None, None, None, True]
    assert report.summary(rows, "deviation") == pytest.approx((0.1, 0.06))
    results = {"cells": rows, "targets": report.TARGETS, "hardware": {"device": "cuda", "name": "GPU"}}
    assert [(verdict.value, verdict.outcome) for verdict in report.verdicts(results)] == [
        (pytest.approx(0.1), "missed"),
        (pytest.approx(0.06), "missed"),
    ]
    report.print_report(results)
    printed = capsys.readouterr().out
    assert "reserved bytes: deviation 20.00% at worst, 20.00% in the median" in printed
    assert "bert: OutOfMemoryError: x" in printed
    assert "bert again: the same bytes" in printed


def test_an_unknown_gpu_needs_a_card(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = load("planning.estimate")
    monkeypatch.setattr(estimate, "running_card", lambda device: None)
    with pytest.raises(SystemExit):
        estimate.parse([], torch.device("cuda", 0))
    assert "choose one with --card" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["neural_operator", "lgt", "fluxflow", pytest.param("causal_lm", marks=pytest.mark.slow)]
)
def test_recipes_come_in_three_sizes(name: str, load: Load, tmp_path: Path) -> None:
    steps = load("planning.steps")
    sizes = ["small", "medium", "large"]
    assert list(steps.RECIPES[name]) == sizes
    definitions = dict(steps.recipe_steps([name], sizes, []))
    assert list(definitions) == [f"{name} {size}" for size in sizes]
    for size, definition in definitions.items():
        assert steps.simulated_step(definition, tmp_path / size).num_micro_batches == 1


def test_given_recipes_are_defined_by_what_their_file_says(load: Load, tmp_path: Path) -> None:
    steps = load("planning.steps")
    file = tmp_path / "lgt.json"
    file.write_text(json.dumps(steps.RECIPES["lgt"]["small"]))
    ((name, definition),) = steps.recipe_steps([], [], [f"train_lgt={file}"])
    assert name == f"train_lgt {file}"
    assert definition["start"] == file.read_text()
    assert steps.simulated_step(definition, tmp_path / "started").num_steps == 2
