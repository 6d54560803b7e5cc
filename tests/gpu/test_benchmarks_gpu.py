"""Runs of each benchmark's accelerator part, at the smallest size, with all its measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import BENCHMARKS, NO_LIMIT, Load, cells_of, environ_of_processes, results_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run_estimate(*options: str) -> None:
    """Use a process of its own: an estimate comes before the first CUDA call."""
    steps = ["--models", "bert", "--recipes", "--sizes", "toy", "--card", "h100"]
    command = [sys.executable, "-m", "benchmarks.planning.estimate", *steps, *options]
    run = subprocess.run(command, env=environ_of_processes(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow  # the next test measures the same cells
def test_estimate(output: Path) -> None:
    run_estimate(NO_LIMIT, "--output", str(output))
    check_measured(cells_of(output))


def test_estimates_made_without_the_gpu_are_compared_on_it(output: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    run_estimate("--estimate-only", "--output", str(kept))
    estimates = json.loads(kept.read_text())
    assert estimates["hardware"]["device"] == "cpu"
    for row in estimates["cells"]:
        row["estimate"]["phase"] = "as kept"
    kept.write_text(json.dumps(estimates))
    run_estimate(NO_LIMIT, "--estimates", str(kept), "--output", str(output))
    rows = cells_of(output)
    check_measured(rows)
    assert {row["estimate"]["phase"] for row in rows} == {"as kept"}


def check_measured(rows: list[dict[str, Any]]) -> None:
    kinds = [(row["definition"]["precision"], row["cudnn_last"], row["again"]) for row in rows]
    plain, half = ("no", False, False), [("bf16", False, False), ("bf16", True, False)]
    assert kinds == [plain, plain, *half, *half, ("no", False, True)]
    for row in rows:
        assert row["measured_allocated_bytes"] > 0
        assert row["deviation"] == row["estimate"]["allocated_bytes"] / row["measured_allocated_bytes"] - 1
        assert row["reserved_deviation"] == row["estimate"]["reserved_bytes"] / row["measured_reserved_bytes"] - 1
        assert row["step_ms"]["num_steps"] >= 2
        assert row["first_step_s"] > 0
        assert {"reserved_bytes", "num_alloc_retries", "clocks"} <= row.keys()
        assert {"FLASH_ATTENTION", "MATH"} <= set(row["attention_order"])
    assert rows[2]["estimate"] == rows[3]["estimate"]


def test_activation_offload(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("activations.modes"), "THRESHOLD_MB", 0.0)
    modes = ["none", "checkpointing", "ours inputs", "ours auto 20 %"]
    sizes = ["--size", "toy", "--layers", "2", "--tokens", "64", "--steps", "2"]
    assert load("activations.offload").main([*sizes, NO_LIMIT, "--output", str(output), "--modes", *modes]) == 0
    cells = cells_of(output)
    assert [cell["mode"] for cell in cells] == modes
    for cell in cells:
        assert cell["gradients_equal"] is True
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["peak_bytes"] > cell["peak_over_start_bytes"] > 0
    assert all(cell["moved_bytes"] > 0 for cell in cells if cell["mode"] == "ours inputs")
    assert all(speed > 0 for speed in results_of(output)["link_gb_per_s"].values())


def test_streamed_weights(load: Load, output: Path) -> None:
    size = ["--size", "toy", "--tokens", "64", "--steps", "2", "--modes", "resident", "host", "file"]
    assert load("streamed_weights").main([*size, NO_LIMIT, "--output", str(output)]) == 0
    resident, *streamed = cells_of(output)
    assert [row["mode"] for row in streamed] == ["host", "file"]
    for row in streamed:
        assert row["gradients_equal"]
        assert row["step_ms"]["num_steps"] == 2
        assert 0 < row["weights_peak_bytes"] < row["brought_bytes"]
        assert row["peak_bytes"] < resident["peak_bytes"]
        assert row["stall_ms"] >= 0


def test_longest_sequence(load: Load, output: Path) -> None:
    sizes = ["--size", "toy", "--workloads", "layers", "--cards", "2", "--to-tokens", "96", "--steps", "2"]
    modes = ["--modes", "none", "checkpointing", "ours inputs", "ours auto"]
    assert load("activations.longest").main([*sizes, *modes, NO_LIMIT, "--output", str(output)]) == 0
    for cell in cells_of(output):
        assert cell["longest_tokens"] == 96
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["tokens_per_s"] > 0
        assert cell["reserved_bytes"] >= cell["peak_bytes"] > 0


def test_probe(load: Load, output: Path) -> None:
    assert load("probe").main(["--size", "toy", "--output", str(output)]) == 0
    found = results_of(output)["facts"]
    assert found["return_codes"] == {"register": 0, "unregister": 0}
    assert found["differing_gradients"]["deterministic"] == 0
    assert all(found[name] > 0 for name in ("page_lock_gib_s", "half_flops", "to_device_gb_s", "to_host_gb_s"))


def test_cache_clearing(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check all variants but the one whose allocator needs a process of its own."""
    benchmark = load("planning.cache_clearing")
    monkeypatch.setattr(benchmark, "SIZES", range(32, 65, 32))
    monkeypatch.setattr(benchmark, "EVERY", 1)
    monkeypatch.delitem(benchmark.VARIANTS, "expandable_segments")
    assert benchmark.main(["--steps", "4", NO_LIMIT, "--output", str(output)]) == 0
    cells = cells_of(output)
    assert [cell["variant"] for cell in cells] == ["default", "empty_cache", "default again"]
    for cell in cells:
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["reserved_bytes"] >= cell["peak_bytes"] > 0
        assert cell["lost_bytes"] >= 0
        assert cell["time_over_default"] > 0


IMPORTS = """
import importlib
import benchmarks.blind
import torch
for name in ("activations.offload", "activations.longest", "teacher.offload", "planning.estimate"):
    importlib.import_module(f"benchmarks.{name}")
assert not torch.cuda.is_initialized()
benchmarks.blind.see()
assert torch.cuda.is_available()
"""


def run_script(script: str, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(BENCHMARKS.parent), environ.get("PYTHONPATH", "")])
    command, environ = [sys.executable, "-c", script], {**environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_importing_benchmarks_as_the_server_does_leaves_cuda_alone() -> None:
    run = run_script(IMPORTS, {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    assert run.returncode == 0, run.stderr


ALLOCATOR_SETTINGS = """
import os
import torch
import benchmarks.planning.cache_clearing  # as the server of cells imports it
assert not torch.cuda.is_initialized()
os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
there = torch.empty(1000, device="cuda")
print(torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"])
"""


def test_the_allocator_reads_its_settings_when_cuda_starts() -> None:
    """Check that an import of torch or of a benchmark reads none: cells set them after both imports."""
    environ = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    run = run_script(ALLOCATOR_SETTINGS, environ)
    assert run.stdout.split() == [str(64 * 2**20)], run.stderr
