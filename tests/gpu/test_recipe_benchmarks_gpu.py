"""The recipes' benchmarks' part for accelerators, at toy size: they run to their end and measure what they promise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import NO_LIMIT, Load, cells_of
from fake_cuda.device import is_loaded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_teacher_offload(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("teacher_offload")
    if is_loaded():  # which has no profiler

        def without_profiler(step: Callable[[], object]) -> dict[str, int]:
            step()
            return {"host_to_device": 0, "device_to_host": 0}

        monkeypatch.setattr(benchmark, "copied_bytes", without_profiler)
    modes = ["resident", "swap"]
    sizes = ["--size", "toy", "--batch-sizes", "2", "--dtypes", "float32", "--warmup", "1", "--steps", "2"]
    sizes += ["--links", "0.1"]
    assert benchmark.main([*sizes, NO_LIMIT, "--output", str(output), "--modes", *modes]) == 0
    cells = {cell["mode"]: cell for cell in cells_of(output)}
    assert list(cells) == [*modes, "swap 0.1 GB/s"]
    assert cells["swap"]["target_equal"]
    assert cells["swap"]["loss_equal"]
    for cell in cells.values():
        assert cell["step_ms"]["num_steps"] == 2
        assert all(peak > 0 for peak in cell["peak_device_bytes"].values())
        assert {"teacher", "forward", "backward", "optimizer"} <= cell["peak_device_bytes"].keys()


def test_lgt_memory(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells in this process; but a plan wants one in which no backward has run on a GPU."""
    benchmark = load("lgt_memory")
    modes = ["plain", "checkpointed", "offloaded"]
    monkeypatch.setattr(benchmark, "in_a_process_of_its_own", lambda cell, options, _: benchmark.outcome(cell, options))
    sizes = ["--size", "toy", "--batch-sizes", "2", "--euler-steps", "1", "--steps", "2", "--card-gb", "2"]
    assert benchmark.main([*sizes, NO_LIMIT, "--output", str(output), "--modes", *modes]) == 0
    _, *cells = cells_of(output)
    assert [cell["mode"] for cell in cells] == modes
    for cell in cells:
        assert cell["losses"] == cells[0]["losses"]
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["peak_bytes"] > 0


def test_fluxflow_memory(
    load: Load, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cells in this process."""
    benchmark, cell_of = load("fluxflow_memory"), load("fluxflow_memory_cell")

    def run_cell(cell: dict[str, Any], timeout_s: float) -> Any:
        cell_of.main(json.dumps(cell))
        torch.cuda.set_per_process_memory_fraction(1.0)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(benchmark, "run_cell", run_cell)
    sizes = ["--size", "toy", "--resolution", "16", "--batch-sizes", "2", "2", "--cards", "2", "--steps", "2"]
    growth = ["--allocators", "default", "--growth-size", "toy", "--growth-resolution", "16", "--growth-steps", "3"]
    variants = ["--variants", "seed", "ours offloaded"]
    assert benchmark.main([*sizes, *variants, *growth, "--no-lpips", NO_LIMIT, "--output", str(output)]) == 0
    *steps, grown = cells_of(output)
    assert {cell["variant"] for cell in steps} == {"seed", "ours offloaded"}
    for cell in steps:
        assert cell["peak_bytes"] > 0
        assert cell["step_ms"]["median"] > 0
    assert grown["num_steps"] == 3
