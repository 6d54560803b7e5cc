"""Each benchmark's part for accelerators, at the smallest size: it runs to its end and measures what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import BENCHMARKS, NO_LIMIT, Load, cells_of, results_of
from fake_cuda.device import is_loaded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_estimate(output: Path) -> None:
    """In a process of its own, in which no backward has run before the estimate."""
    launch = ["-m", "fake_cuda.launch"] if is_loaded() else []
    options = ["--models", "bert", "--sizes", "toy", "--output", str(output)]
    run = subprocess.run(
        [sys.executable, *launch, str(BENCHMARKS / "estimate.py"), *options], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    rows = results_of(output)["rows"]
    assert len(rows) == 4
    assert {row.get("error") for row in rows} == {None}
    assert all(row["measured_allocated_bytes"] > 0 for row in rows)


def test_activation_offload(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("activation_modes"), "THRESHOLD_MB", 0.0)
    modes = ["none", "checkpointing", "ours inputs", "ours auto 20 %"]
    sizes = ["--size", "toy", "--layers", "2", "--tokens", "64", "--steps", "2", "--link-divisors", "1", "2"]
    assert load("activation_offload").main([*sizes, NO_LIMIT, "--output", str(output), "--modes", *modes]) == 0
    cells = cells_of(output)
    assert [cell["mode"] for cell in cells] == [*modes, "ours inputs", "ours auto 20 %"]
    for cell in cells:
        assert cell["gradients_equal"] is True
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["peak_bytes"] > cell["peak_over_weights_bytes"] > 0
    assert all(cell["moved_bytes"] > 0 for cell in cells if cell["mode"] == "ours inputs")
    assert all(speed > 0 for speed in results_of(output)["link_gb_per_s"].values())


def test_neural_operator(load: Load, output: Path) -> None:
    """Without a card and on one."""
    modes = ["plain", "ours all", "ours auto"]
    sizes = ["--size", "toy", "--nodes", "16", "--batch-size", "2", "--batch-sizes", "2", "--cards", "2"]
    arguments = [*sizes, "--steps", "2", NO_LIMIT, "--output", str(output), "--modes", *modes]
    assert load("neural_operator").main(arguments) == 0
    cells = cells_of(output)
    assert [cell["mode"] for cell in cells] == 2 * modes
    for cell in cells:
        assert cell["gradients_equal"] is True
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["peak_bytes"] > 0


def test_cache_clearing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are those of one variant each; here they are calls."""
    benchmark = load("cache_clearing")
    monkeypatch.setattr(benchmark, "SIZES", range(32, 65, 32))
    monkeypatch.setattr(benchmark, "EVERY", 1)
    for variant in ["default", "empty_cache"]:
        row = benchmark.measure(variant, 4)
        assert row["step_ms"]["median"] > 0
        assert row["reserved_bytes"] >= row["peak_allocated_bytes"] > 0


def test_a_slow_link_takes_its_time_and_brings_the_bytes(load: Load) -> None:
    copier = load("slow_link").SlowLinkCopier(torch.device("cuda", 0), gb_per_s=0.1)
    source, there = copier.empty_host(2**20), copier.empty_device(2**20)
    source.random_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    copier.to_device(source, there).wait()
    end.record()
    end.synchronize()
    assert torch.equal(there.cpu(), source)
    assert begin.elapsed_time(end) > 0.5 * 2**20 / 0.1e6
