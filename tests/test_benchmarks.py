"""The benchmarks run at toy size on the CPU, write what they promise, and the documentation quotes only that."""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S

ROOT = Path(__file__).parents[1]
DOCUMENTATION = (ROOT / "docs" / "benchmarks.md").read_text()
# Named there, since `make bench` leaves more in this checkout.
RESULTS = re.findall(r"`([\w-]+\.json)`", DOCUMENTATION)
OWN_MODES = ["resident", "seed", "swap", "swap+shared"]
DIRECTIONS = {"host_to_device", "device_to_host"}

Load = Callable[[str], Any]
Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Imports a file of benchmarks/, which is no package, as running it as a script would."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def float32_run(load: Load, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_toy(load, tmp_path_factory.mktemp("float32"), "--dtypes", "float32")


@pytest.fixture(scope="module")
def bfloat16_run(load: Load, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_toy(load, tmp_path_factory.mktemp("bfloat16"), "--dtypes", "bfloat16", "--modes", *OWN_MODES)


def run_toy(load: Load, folder: Path, *options: str) -> dict[str, Any]:
    output = folder / "results.json"
    arguments = ["--size", "toy", "--batch-sizes", "2", "--warmup", "1", f"--time-limit-s={HANG_S}"]
    assert load("teacher_offload").main([*arguments, "--output", str(output), *options]) == 0
    return json.loads(output.read_text())


def by_mode(results: dict[str, Any]) -> Cells:
    return {cell["mode"]: cell for cell in results["cells"]}


def test_every_mode_runs_and_reports_the_promised_fields(float32_run: dict[str, Any], load: Load) -> None:
    assert float32_run["complete"]
    assert {"hardware", "versions", "python", "commit", "date", "size", "targets"} <= float32_run.keys()
    assert set(float32_run["versions"]) >= {"torch", "transformers", "accelerate", "lerobot", "diffusers", "hf_memopt"}
    cells = by_mode(float32_run)
    assert list(cells) == list(load("teacher_modes").MODES)
    for cell in cells.values():
        assert "error" not in cell
        assert cell["host_rss_bytes"] > 0
        assert {"loss", "loss_equal", "loss_difference", "target_equal", "target_max_difference"} <= cell.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_teacher_gives_bitwise_the_resident_target_and_loss(dtype: str, request: pytest.FixtureRequest) -> None:
    swap = by_mode(request.getfixturevalue(f"{dtype}_run"))["swap"]
    assert swap["target_equal"]
    assert swap["loss_equal"]


def test_shared_prefix_stays_within_rounding_of_the_resident_target(float32_run: dict[str, Any]) -> None:
    shared = by_mode(float32_run)["swap+shared"]
    assert shared["target_max_difference"] < 1e-5
    assert shared["loss_difference"] < 1e-5


def test_comparison_notices_a_teacher_rounded_to_bfloat16(bfloat16_run: dict[str, Any]) -> None:
    seed = by_mode(bfloat16_run)["seed"]
    assert not seed["target_equal"]
    assert seed["target_max_difference"] > 0


def test_swap_never_copies_back_and_sharing_copies_less(float32_run: dict[str, Any]) -> None:
    cells = by_mode(float32_run)
    whole, swap, shared = (cells[mode]["traffic_bytes"] for mode in ("seed", "swap", "swap+shared"))
    assert whole["computed"].keys() == DIRECTIONS
    assert whole["computed"]["host_to_device"] == 4 * float32_run["num_parameters"] + buffer_bytes(float32_run)
    assert whole["computed"]["host_to_device"] <= swap["copier"]["host_to_device"]
    assert shared["copier"]["host_to_device"] < swap["copier"]["host_to_device"] / 2
    assert swap["copier"]["device_to_host"] == shared["copier"]["device_to_host"] == 0


def buffer_bytes(results: dict[str, Any]) -> int:
    # Two rotary tables for the VLM and two for the expert, of head_dim / 2 = 8 float32 frequencies each.
    assert results["size"] == "toy"
    return 4 * 8 * 4


def test_cpu_run_reports_no_times(float32_run: dict[str, Any], load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("teacher_report").print_report(float32_run)
    printed = capsys.readouterr().out
    assert "No accelerator: step times" in printed
    assert "swap / resident, step_ms: not measured (target 1.02)" in printed
    for cell in float32_run["cells"]:
        assert "step_ms" not in cell
        assert cell["peak_device_bytes"] == {}


@pytest.mark.parametrize(
    ("mode", "error", "status"),
    [
        ("resident", torch.OutOfMemoryError("too small"), 0),
        ("accelerate", RuntimeError("hook failed"), 0),
        ("swap", RuntimeError("broken"), 1),
    ],
)
def test_a_failing_cell_is_recorded_and_only_our_own_fault_fails_the_run(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, error: Exception, status: int
) -> None:
    def fail(source: object) -> None:
        raise error

    monkeypatch.setitem(load("teacher_modes").MODES, mode, fail)
    output = tmp_path / "results.json"
    options = ["--size", "toy", "--modes", mode, "--dtypes", "float32", "--batch-sizes", "1", "2"]
    assert load("teacher_offload").main([*options, "--output", str(output)]) == status
    errors = [cell["error"] for cell in json.loads(output.read_text())["cells"]]
    assert errors == [f"{type(error).__name__}: {error}"] * 2


def test_no_cell_begins_after_the_time_limit(load: Load, tmp_path: Path) -> None:
    results = run_toy(load, tmp_path, "--time-limit-s", "-1", "--modes", "resident")
    assert all(cell["error"].startswith("not run: ") for cell in results["cells"])


def test_verdicts_compare_step_times_and_peaks(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    def cell(mode: str, step_ms: float, teacher: int, forward: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "dtype": "float32",
            "batch_size": 8,
            "step_ms": {"median": step_ms},
            "peak_device_bytes": {"teacher": teacher, "forward": forward},
        }

    cells = [cell("resident", 100, 9, 1), cell("seed", 200, 4, 8), cell("swap", 103, 1, 2)]
    cells.append(cell("swap+shared", 90, 3, 4))
    hardware = {"device": "cuda", "name": "a device"}
    load("teacher_report").print_report({"size": "real", "hardware": hardware, "cells": cells})
    printed = capsys.readouterr().out
    assert "swap / resident, step_ms: 1.030 (target 1.02: missed)" in printed
    assert "swap+shared / seed, step_ms: 0.450 (target 0.6: met)" in printed
    assert "swap+shared / seed, peak_bytes: 0.500 (target 0.5: met)" in printed


def test_saved_bytes_compares_the_same_step(load: Load, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    load("saved_bytes").main(["--size", "toy", "--output", str(output)])
    cases = json.loads(output.read_text())["state_projection"]
    assert cases.keys() == {"frozen", "trained"}
    for case in cases.values():
        assert 0 < case["shared_bytes"] < case["joint_bytes"] / 2
        assert case["ratio"] == case["shared_bytes"] / case["joint_bytes"]
        assert case["loss_difference"] < 1e-5
        assert case["max_relative_gradient_difference"] < 1e-5
    assert cases["frozen"]["shared_bytes"] < cases["trained"]["shared_bytes"]


def test_copies_of_a_trace_are_summed_by_direction(load: Load) -> None:
    def copy(name: str, num_bytes: int) -> dict[str, Any]:
        return {"cat": "gpu_memcpy", "name": f"Memcpy {name}", "args": {"bytes": num_bytes}}

    events = [
        {"cat": "kernel", "name": "gemm"},
        {"ph": "M", "name": "process_name"},
        copy("HtoD (Pageable -> Device)", 3),
        copy("HtoD (Pinned -> Device)", 4),
        copy("DtoH (Device -> Pinned)", 5),
        copy("DtoD (Device -> Device)", 6),
    ]
    assert load("common").sum_copies({"traceEvents": events}) == {"host_to_device": 7, "device_to_host": 5}
    with pytest.raises(RuntimeError, match="no device activity"):
        load("common").sum_copies({"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}]})


def test_phase_peaks_keep_the_highest_of_each_phase(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 7, 6, 2])
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: next(readings))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", resets.append)
    peaks = load("common").PhasePeaks(torch.device("cuda"))
    for _ in range(2):
        peaks.start()
        peaks.mark("teacher")
        peaks.mark("backward")
    assert peaks.peak_bytes == {"teacher": 6, "backward": 7}
    assert len(resets) == 6


def test_step_times_stop_at_the_limits(load: Load) -> None:
    common, cpu = load("common"), torch.device("cpu")
    assert len(common.step_times_ms(lambda: None, cpu, max_steps=3, max_seconds=60)) == 3
    assert len(common.step_times_ms(lambda: None, cpu, max_steps=9, max_seconds=0, min_steps=2)) == 2


def test_results_file_survives_a_failed_write(load: Load, tmp_path: Path) -> None:
    path = load("common").write_results({"value": 1}, tmp_path / "results.json")
    with pytest.raises(TypeError):
        load("common").write_results({"value": object()}, path)
    assert json.loads(path.read_text()) == {"value": 1}


@pytest.mark.parametrize("file", RESULTS)
def test_documentation_quotes_the_committed_results(file: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    printers = {"teacher_offload": "teacher_report", "activation_offload": "activation_report"}
    printer = printers.get(results["benchmark"], results["benchmark"])
    load(printer).print_report(results)
    assert capsys.readouterr().out.strip() in DOCUMENTATION


def test_cache_clearing_runs_a_step_of_its_workload(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are those of CUDA's allocator; what runs elsewhere is the training step and the table."""
    benchmark = load("cache_clearing")
    monkeypatch.setattr(benchmark, "SIZES", range(32, 65, 32))
    row = benchmark.measure("empty_cache", 2, torch.device("cpu"))
    assert row["step_ms"]["median"] > 0
    benchmark.print_report({"rows": {"default": row | {"reserved_bytes": 2**31, "peak_allocated_bytes": 2**30}}})
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["1.00", "0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures there")
def test_cache_clearing_says_that_it_needs_cuda(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("cache_clearing").main([]) == 1
    assert "No CUDA device" in capsys.readouterr().out
