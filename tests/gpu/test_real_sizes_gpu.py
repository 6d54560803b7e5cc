"""Runs of benchmarks at sizes that need a real GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import BENCHMARKS, NO_LIMIT, Load, cells_of, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OWN_MODES = ["resident", "seed", "swap", "swap+shared"]


def test_estimates_are_what_cuda_allocates(load: Load, output: Path, tmp_path: Path) -> None:
    """Estimate in another process: in this one backward may have run already."""
    module, kept, sizes = ["-m", "benchmarks.planning.estimate"], tmp_path / "kept.json", ["--sizes", "small"]
    make = [sys.executable, *module, *sizes, "--estimate-only", "--output", str(kept)]
    subprocess.run(make, cwd=BENCHMARKS.parent, check=True)
    measure = [sys.executable, *module, *sizes, NO_LIMIT, "--estimates", str(kept), "--output", str(output)]
    subprocess.run(measure, cwd=BENCHMARKS.parent, check=True)
    cells_of(output)
    verdicts = list(load("planning.estimate_report").verdicts(results_of(output)))
    assert {verdict.outcome for verdict in verdicts} == {"met"}, [str(verdict) for verdict in verdicts]


def test_activation_offloading(load: Load, output: Path) -> None:
    modes = ["--modes", "none", "checkpointing", "ours inputs"]
    sizes = ["--size", "real", "--layers", "4", "--tokens", "2048"]
    assert load("activations.offload").main([*sizes, *modes, NO_LIMIT, "--output", str(output)]) == 0
    cells = {cell["mode"]: cell for cell in results_of(output)["cells"]}
    for cell in cells.values():
        assert cell["step_ms"]["num_steps"] >= 2
        assert cell["gradients_equal"]
    assert cells["checkpointing"]["peak_bytes"] < cells["none"]["peak_bytes"]
    plain = cells["none"]
    assert plain["peak_over_start_bytes"] == pytest.approx(plain["saved_bytes"] + plain["temporary_bytes"], rel=0.02)


def test_a_plan_is_what_is_measured(load: Load, output: Path) -> None:
    """Check the peak of saved activations within 3 %, and the time of a step within 5 %."""
    sizes = ["--size", "real", "--layers", "4", "--tokens", "8192"]
    assert (
        load("activations.offload").main([*sizes, "--modes", "ours auto 20 %", NO_LIMIT, "--output", str(output)]) == 0
    )
    (cell,) = results_of(output)["cells"]
    assert cell["offloader_peak_gib"] == pytest.approx(cell["predicted_peak_gib"], rel=0.03)
    assert cell["step_ms"]["median"] == pytest.approx(cell["predicted_step_ms"], rel=0.05)


def test_teacher_offloading(load: Load, output: Path) -> None:
    sizes = ["--size", "toy", "--batch-sizes", "2", "--warmup", "1", "--dtypes", "float32", "--steps", "3"]
    assert load("teacher.offload").main([*sizes, NO_LIMIT, "--output", str(output)]) == 0
    cells = {cell["mode"]: cell for cell in results_of(output)["cells"]}
    for mode in OWN_MODES:
        assert cells[mode]["step_ms"]["num_steps"] >= 2
        assert {"teacher", "forward", "backward", "optimizer"} <= cells[mode]["peak_device_bytes"].keys()
    assert {mode for mode, cell in cells.items() if "error" in cell} == set()
    assert cells["swap"]["target_equal"]
    moved = cells["swap"]["traffic_bytes"]
    assert moved["profiler"]["host_to_device"] >= moved["copier"]["host_to_device"]
    assert cells["seed"]["traffic_bytes"]["profiler"]["device_to_host"] >= moved["copier"]["host_to_device"] // 2
