"""The FluxFlow memory benchmark: its cells on the CPU, and verdicts on figures that are made up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import BENCHMARKS, NO_LIMIT


@pytest.fixture
def benchmark(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On the CPU also where there is a GPU."""
    for module in ("fluxflow.memory", "fluxflow.cell"):
        monkeypatch.setattr(load(module), "current_device", lambda: torch.device("cpu"))
    return load("fluxflow.memory")


def test_every_variant_has_the_same_gradients(
    benchmark: Any, load: Any, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    growth = ["--allocators", "default", "--growth-size", "toy", "--growth-resolution", "16", "--growth-steps", "3"]
    assert benchmark.main(["--no-lpips", *growth, NO_LIMIT, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["complete"]
    steps = [cell for cell in results["cells"] if cell["part"] == "step"]
    assert [cell["variant"] for cell in steps] == [*load("fluxflow.cell").VARIANTS, "plain again"]
    norms = [cell["grad_norm"] for cell in steps]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert norms[-1] == norms[0]
    assert all(cell["gradients_equal"] is True for cell in steps)
    assert results["cells"][-1]["num_steps"] == 3
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cell_has_a_process_of_its_own(output: Path) -> None:
    options = ["--variants", "ours", "--no-lpips", "--output", str(output)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.fluxflow.memory", *options, NO_LIMIT],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == 0
    assert json.loads(output.read_text())["cells"][0]["grad_norm"] > 0


def row(variant: str, **more: Any) -> dict[str, Any]:
    return {"part": "step", "variant": variant, "card_gb": None, "batch_size": 3, **more}


def grown(last: int | None, **more: Any) -> dict[str, Any]:
    def sample(size: int) -> dict[str, int]:
        return {"allocated_bytes": size, "reserved_bytes": 9000, "num_alloc_retries": 1}

    sizes = {"first": sample(1000) if last else {}, "last": sample(last or 1000)}
    return {"part": "growth", "allocator": "default", "steps": 2000, "num_steps": 2000, **sizes, **more}


def test_gradients_are_compared_with_the_plain_ones_of_the_same_batch(benchmark: Any) -> None:
    rows = [row("seed", grad_norm=2.0), row("plain", grad_norm=1.0), row("ours", grad_norm=1.001)]
    rows += [row("ours", grad_norm=1.1), row("ours", grad_norm=float("nan")), row("ours", error="ValueError: no")]
    rows += [row("ours", grad_norm=9.0, batch_size=4), row("ours offloaded", grad_norm=8.0, batch_size=4), grown(1000)]
    benchmark.judge(rows)
    equal = [each.get("gradients_equal") for each in rows]
    assert equal == [False, True, True, False, False, None, True, False, None]


def test_a_variant_with_other_gradients_or_a_fault_fails_the_run(
    benchmark: Any, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_with(ours: float | Exception) -> int:
        def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
            if settings["variant"] != "ours":
                return {"grad_norm": 1.0}
            if isinstance(ours, Exception):
                raise ours
            return {"grad_norm": ours}

        monkeypatch.setattr(benchmark, "measure", measure)
        return benchmark.main(["--variants", "plain", "ours", NO_LIMIT, "--output", str(output)])

    assert run_with(1.001) == 0
    assert run_with(1.1) == 1
    assert run_with(torch.OutOfMemoryError("no")) == 0
    assert run_with(ValueError("planted\nin two lines")) == 1
    assert json.loads(output.read_text())["cells"][1]["error"] == "ValueError: planted\nin two lines"


def test_cells_are_named_once_and_bring_the_allocators_environment(benchmark: Any) -> None:
    options = benchmark.parse(["--output", "x"], torch.device("cuda", 0))
    cells = list(benchmark.cells(options))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    assert names[0] == "plain, batch 3"
    assert names[5] == "plain again, batch 3"
    environs = {cell.settings["allocator"]: cell.environ for cell in cells if cell.settings["part"] == "growth"}
    assert environs["default"] == environs["empty_cache every 16"] == {}
    assert environs["expandable segments"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_verdicts(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def step(variant: str, peak: int, step_ms: float, **more: Any) -> dict[str, Any]:
        return row(variant, peak_bytes=peak, step_ms={"median": step_ms}, **more)

    cells = [step("seed", 1000, 100), step("ours", 700, 104), step("ours checkpointed", 500, 140)]
    cells.append(row("ours offloaded", error="ValueError: no\nnot at all"))
    on_card = [row("seed", card_gb=8.0), row("ours", card_gb=8.0, error="OutOfMemoryError: no")]
    on_card.append(step("ours checkpointed", 1, 1, card_gb=8.0))
    cells += [*on_card, grown(1001), grown(1002), grown(None), grown(None, error="not run: no time")]
    results = {"hardware": {"device": "cuda"}, "targets": benchmark.TARGETS, "cells": cells}
    assert [(verdict.what, verdict.outcome) for verdict in benchmark.verdicts(results)] == [
        ("batch 3 on 8 GB, variants of ours that fit", "met"),
        ("ours, peak / seed", "met"),
        ("ours, step / seed", "met"),
        ("ours checkpointed, peak / seed", "met"),
        ("ours checkpointed, step / seed", "missed"),
        ("ours offloaded, peak / seed", "not measured"),
        ("ours offloaded, step / seed", "not measured"),
        ("growth over 2000 steps, default", "met"),
        ("growth over 2000 steps, default", "missed"),
        ("growth over 2000 steps, default", "not measured"),
        ("growth over 2000 steps, default", "not measured"),
    ]
    results["cells"] = cells[:-5]
    assert next(benchmark.verdicts(results)).outcome == "missed"
    results["cells"] = [row("ours", card_gb=8.0, error="not run: no time")]
    assert next(benchmark.verdicts(results)).outcome == "not measured"
    benchmark.print_report({**results, "cells": cells})
    assert "ValueError: no\n" in capsys.readouterr().out
