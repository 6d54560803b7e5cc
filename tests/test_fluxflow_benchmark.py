"""The FluxFlow memory benchmark: a cell of its own process on the CPU, and verdicts on figures that are made up."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Imports a file of benchmarks/, which is no package, as running it as a script would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module


@pytest.fixture
def on_the_cpu(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with a GPU."""
    for module in ("fluxflow_memory", "fluxflow_memory_cell"):
        monkeypatch.setattr(load(module), "current_device", lambda: torch.device("cpu"))


def in_this_process(load: Any, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any], float], Any]:
    def run_cell(cell: dict[str, Any], timeout_s: float) -> Any:
        load("fluxflow_memory_cell").main(json.dumps(cell))
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run_cell


@pytest.mark.usefixtures("on_the_cpu")
def test_every_variant_has_the_same_gradients(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load("fluxflow_memory")
    monkeypatch.setattr(benchmark, "run_cell", in_this_process(load, capsys))
    output = tmp_path / "results.json"
    growth = ["--allocators", "default", "--growth-size", "toy", "--growth-resolution", "16", "--growth-steps", "3"]
    assert benchmark.main(["--no-lpips", *growth, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["complete"]
    steps = [cell for cell in results["cells"] if cell["part"] == "step"]
    assert [cell["variant"] for cell in steps] == list(load("fluxflow_memory_cell").VARIANTS)
    norms = [cell["grad_norm"] for cell in steps]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert results["cells"][-1]["num_steps"] == 3
    assert "No accelerator: step times and device memory were not measured" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_a_cell_has_a_process_of_its_own(load: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert load("fluxflow_memory").main(["--variants", "ours", "--no-lpips", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["cells"][0]["grad_norm"] > 0


def test_a_variant_with_other_gradients_fails(load: Any) -> None:
    def cell(norm: float, **more: Any) -> dict[str, Any]:
        return {"part": "step", "variant": "ours", "batch_size": 2, "grad_norm": norm, **more}

    failures = load("fluxflow_memory").failures
    assert failures({"cells": [cell(1.0), cell(1.001)]}) == []
    assert failures({"cells": [cell(1.0), cell(1.1), cell(9.0, batch_size=3)]}) == [cell(1.1)]
    assert failures({"cells": [{"error": "OutOfMemoryError: no"}]}) == []
    assert failures({"cells": [{"error": "ValueError: no"}]}) == [{"error": "ValueError: no"}]


def test_what_takes_too_long_or_fails_is_a_result(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = load("fluxflow_memory")
    monkeypatch.setattr(benchmark.sys, "executable", "/bin/sh")
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "fluxflow_memory.py"))
    script = tmp_path / "fluxflow_memory_cell.py"
    script.write_text("echo 'ValueError: planted' >&2; exit 3")
    assert benchmark.run_cell({}, 60.0) == {"error": "ValueError: planted"}
    script.write_text("exec sleep 20")
    assert benchmark.run_cell({}, 0.1)["error"].startswith("not finished")
    script.write_text("echo noise; echo '{\"settings\": \"'$PYTORCH_ALLOC_CONF'\"}'")
    assert benchmark.run_cell({"allocator": "expandable_segments:True"}, 60.0) == {
        "settings": "expandable_segments:True"
    }


def test_verdicts(load: Any) -> None:
    benchmark = load("fluxflow_memory")

    def cell(variant: str, peak: int, step_ms: float, **more: Any) -> dict[str, Any]:
        found = {"part": "step", "variant": variant, "card_gb": None, "batch_size": 3, "peak_bytes": peak}
        return {**found, "step_ms": {"median": step_ms}, **more}

    def grown(last: int) -> dict[str, Any]:
        sizes = [{"allocated_bytes": size, "reserved_bytes": 9000, "num_alloc_retries": 1} for size in (1000, last)]
        return {"part": "growth", "allocator_name": "default", "num_steps": 2000, "first": sizes[0], "last": sizes[1]}

    cells = [cell("seed", 1000, 100), cell("ours", 700, 104), cell("ours checkpointed", 500, 140)]
    cells += [cell("seed", 1, 1, card_gb=8, error="OutOfMemoryError: no"), cell("ours", 1, 1, card_gb=8)]
    results = {
        "hardware": {"device": "cuda"},
        "targets": benchmark.TARGETS,
        "cells": [*cells, grown(1001), grown(1002)],
    }
    assert list(benchmark.verdicts(results)) == [
        "batch 3 on 8 GB: ours of 2",
        "ours: 0.70 x the seed's peak at 1.04 x its time (target 0.8 x at 1.05 x: met)",
        "ours checkpointed: 0.50 x the seed's peak at 1.40 x its time (target 0.8 x at 1.05 x: missed)",
        "growth over 2000 steps, default: 0.100% (target 0.1%: met)",
        "growth over 2000 steps, default: 0.200% (target 0.1%: missed)",
    ]
