"""The benchmarks run at toy size on the CPU, write what they promise, and the documentation quotes only that."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from patience import HANG_S

ROOT = Path(__file__).parents[2]
DOCUMENTATION = "".join((ROOT / "docs" / page).read_text() for page in ("benchmarks.md", "choosing.md", "trainer.md"))
# Named there, since `make bench` leaves more in this checkout.
RESULTS = re.findall(r"`([\w-]+\.json)`", DOCUMENTATION)
OWN_MODES = ["resident", "seed", "swap", "swap+shared"]
DIRECTIONS = {"host_to_device", "device_to_host"}
# Of the toy: two rotary tables for the VLM and two for the expert, of head_dim / 2 = 8 float32 frequencies each.
BUFFER_BYTES = 4 * 8 * 4

Load = Callable[[str], Any]
Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def float32_run(load: Load, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_toy(load, tmp_path_factory.mktemp("float32"), "--dtypes", "float32")


@pytest.fixture(scope="module")
def bfloat16_run(load: Load, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_toy(load, tmp_path_factory.mktemp("bfloat16"), "--dtypes", "bfloat16", "--modes", *OWN_MODES)


def run_toy(load: Load, folder: Path, *options: str) -> dict[str, Any]:
    output = folder / "results.json"
    arguments = ["--size", "toy", "--batch-sizes", "2", "--warmup", "1", f"--time-limit-s={HANG_S}"]
    assert load("teacher.offload").main([*arguments, "--output", str(output), *options]) == 0
    return json.loads(output.read_text())


def by_mode(results: dict[str, Any]) -> Cells:
    return {cell["mode"]: cell for cell in results["cells"]}


def test_every_mode_runs_and_reports_the_promised_fields(float32_run: dict[str, Any], load: Load) -> None:
    assert float32_run["complete"]
    assert {"hardware", "versions", "python", "commit", "date", "targets"} <= float32_run.keys()
    assert set(float32_run["versions"]) >= {"torch", "transformers", "accelerate", "lerobot", "diffusers", "hf_memopt"}
    cells = by_mode(float32_run)
    assert list(cells) == [*load("teacher.modes").MODES, "resident again"]
    for cell in cells.values():
        assert "error" not in cell
        assert cell["size"] == "toy"
        assert cell["host_rss_bytes"] > 0
        assert cell["first_step_s"] > 0
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


@pytest.mark.parametrize("mode", ["resident again", "diffusers-leaf", "diffusers-block", "accelerate", "stream-all"])
def test_resident_teacher_again_and_other_libraries_give_bitwise_its_answer(
    float32_run: dict[str, Any], mode: str
) -> None:
    cell = by_mode(float32_run)[mode]
    assert cell["target_equal"]
    assert cell["loss_equal"]


def test_nothing_is_compared_without_the_resident_answer(load: Load, tmp_path: Path) -> None:
    (cell,) = run_toy(load, tmp_path, "--dtypes", "float32", "--modes", "swap")["cells"]
    assert {key for key in cell if key.startswith(("loss", "target"))} == {"loss"}


def test_a_start_that_was_not_finished_is_made_again(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = load("teacher.offload")
    size = benchmark.SIZES["toy"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            benchmark.start(size, tmp_path)
    first, checkpoint = benchmark.start(size, tmp_path)
    assert (checkpoint / "model.safetensors").exists()
    monkeypatch.setattr(benchmark, "build_policy", Mock(side_effect=AssertionError("built twice")))
    second, _ = benchmark.start(size, tmp_path)
    for built, loaded in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(built, loaded)


@pytest.fixture
def source(load: Load, tmp_path: Path) -> Any:
    """Of a mode, on the CPU."""
    benchmark = load("teacher.offload")
    policy, checkpoint = benchmark.start(benchmark.SIZES["toy"], tmp_path)
    return load("teacher.modes").Source(policy, checkpoint, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("mode", "own_options"),
    [
        ("diffusers-leaf", {"offload_type": "leaf_level"}),
        ("diffusers-block", {"offload_type": "block_level", "num_blocks_per_group": 1}),
    ],
)
def test_diffusers_is_asked_for_a_stream_on_accelerators_and_for_none_on_the_cpu(
    mode: str, own_options: dict[str, Any], source: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, modes = Mock(), load("teacher.modes")
    monkeypatch.setattr("diffusers.hooks.apply_group_offloading", apply)
    monkeypatch.setattr(modes, "_with_stock_teacher", Mock())
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        start = copy.deepcopy(source.policy)
        modes.MODES[mode](dataclasses.replace(source, policy=start, device=device))
        streams = device.type != "cpu"
        options = {"onload_device": device, "use_stream": streams, "record_stream": streams, **own_options}
        assert apply.call_args.kwargs == options


def test_blocks_hold_all_weights_but_the_projections_and_what_the_vision_model_begins_and_ends_with(
    source: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Mock()
    monkeypatch.setattr("diffusers.hooks.apply_group_offloading", apply)
    load("teacher.modes").MODES["diffusers-block"](source)
    (sampler,) = apply.call_args.args
    in_blocks = {id(parameter) for parameter in sampler.blocks.parameters()}
    left = {name for name, parameter in sampler.model.named_parameters() if id(parameter) not in in_blocks}
    assert len(in_blocks) + len(left) == len(list(source.policy.model.parameters()))
    vision = "vlm_with_expert.vlm.model.vision_model."
    assert all(name.startswith((vision, "state_proj", "action_")) for name in left)
    assert not any(name.startswith(f"{vision}encoder") for name in left)


def test_accelerate_is_given_the_teachers_weights(source: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Mock()
    monkeypatch.setattr("accelerate.cpu_offload", offload)
    load("teacher.modes").MODES["accelerate"](source)
    (sampler,) = offload.call_args.args
    given = offload.call_args.kwargs
    assert given["execution_device"] == source.device
    assert given["state_dict"].keys() == sampler.state_dict().keys()


def test_a_link_slower_than_asked_for_is_no_failure(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = load("teacher.slow_link")
    monkeypatch.setattr(link.StreamCopier, "__init__", lambda self, device: None)
    monkeypatch.setattr(link.StreamCopier, "__del__", lambda self: None)
    monkeypatch.setattr(link.StreamCopier, "empty_host", lambda self, num_bytes: torch.empty(1))
    monkeypatch.setattr(link.StreamCopier, "empty_device", lambda self, num_bytes: torch.empty(1))
    monkeypatch.setattr(link, "_seconds", lambda work: link._PROBE_BYTES / 5e9)
    results = run_toy(load, tmp_path, "--dtypes", "float32", "--modes", "swap", "--links", "12")
    errors = [cell.get("error") for cell in results["cells"]]
    assert errors == [None, "not run: this machine's link has 5.0 GB/s, less than 12"]


def test_swap_never_copies_back_and_sharing_copies_less(float32_run: dict[str, Any]) -> None:
    cells = by_mode(float32_run)
    whole, swap, shared = (cells[mode]["traffic_bytes"] for mode in ("seed", "swap", "swap+shared"))
    assert whole["computed"].keys() == DIRECTIONS
    num_parameters = cells["seed"]["num_parameters"]
    assert whole["computed"]["host_to_device"] == 4 * num_parameters + BUFFER_BYTES
    assert whole["computed"]["host_to_device"] <= swap["copier"]["host_to_device"]
    assert shared["copier"]["host_to_device"] < swap["copier"]["host_to_device"] / 2
    assert swap["copier"]["device_to_host"] == shared["copier"]["device_to_host"] == 0


def test_cpu_run_reports_no_times(float32_run: dict[str, Any], load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("teacher.report").print_report(float32_run)
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

    monkeypatch.setitem(load("teacher.modes").MODES, mode, fail)
    output = tmp_path / "results.json"
    options = ["--size", "toy", "--modes", mode, "--dtypes", "float32", "--batch-sizes", "1", "2"]
    assert load("teacher.offload").main([*options, "--output", str(output)]) == status
    errors = [cell["error"] for cell in json.loads(output.read_text())["cells"]]
    assert errors == [f"{type(error).__name__}: {error}"] * 2


def test_no_cell_begins_after_the_time_limit(load: Load, tmp_path: Path) -> None:
    results = run_toy(load, tmp_path, "--time-limit-s", "-1", "--modes", "resident")
    assert all(cell["error"].startswith("not run: ") for cell in results["cells"])


def test_verdicts_compare_step_times_and_peaks(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    def cell(mode: str, **found: Any) -> dict[str, Any]:
        return {"size": "real", "mode": mode, "dtype": "float32", "batch_size": 8, "link_gb_per_s": None, **found}

    def measured(mode: str, step_ms: float, peak_bytes: int) -> dict[str, Any]:
        return cell(mode, step_ms={"median": step_ms}, peak_bytes=peak_bytes)

    cells = [measured("resident", 100, 9), measured("seed", 200, 8), measured("swap", 103, 2)]
    cells += [measured("swap+shared", 90, 4), cell("stream", error="OutOfMemoryError: too small")]
    cells.append(measured("swap", 400, 2) | {"link_gb_per_s": 12.0})
    report, hardware = load("teacher.report"), {"device": "cuda", "name": "a device"}
    results = {"hardware": hardware, "targets": report.TARGETS, "cells": cells}
    report.print_report(results)
    printed = capsys.readouterr().out
    assert "\nswap 12 GB/s " in printed
    assert "stream: OutOfMemoryError: too small" in printed
    assert "stream / seed, step_ms: not measured (target 1)" in printed
    assert "swap / resident, step_ms: 1.03 (target 1.02: missed)" in printed
    assert "swap+shared / seed, step_ms: 0.45 (target 0.6: met)" in printed
    assert "swap+shared / seed, peak_bytes: 0.5 (target 0.5: met)" in printed
    found = {verdict.what: verdict.outcome for verdict in report.verdicts(results)}
    assert found["float32, batch 8, swap / resident, step_ms"] == "missed"
    assert len(found) == len(report.TARGETS)


def test_saved_bytes_compares_the_same_step(load: Load, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    load("teacher.saved_bytes").main(["--size", "toy", "--output", str(output)])
    cases = json.loads(output.read_text())["state_projection"]
    assert cases.keys() == {"frozen", "trained"}
    for case in cases.values():
        assert 0 < case["shared_bytes"] < case["joint_bytes"] / 2
        assert case["ratio"] == case["shared_bytes"] / case["joint_bytes"]
        assert case["loss_difference"] < 1e-5
        assert case["max_relative_gradient_difference"] < 1e-5
    assert cases["frozen"]["shared_bytes"] < cases["trained"]["shared_bytes"]


def test_a_shared_prefix_takes_less_of_the_whole_memory(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load("teacher.total_memory")
    monkeypatch.setattr(benchmark, "HOMES", ("resident",))
    output = tmp_path / "results.json"
    benchmark.main(["--size", "toy", "--batch-sizes", "4", "--output", str(output)])
    own, shared = json.loads(output.read_text())["cells"]
    assert (own["share_prefix"], shared["share_prefix"]) == ("off", "on")
    for cell in (own, shared):
        assert cell["peak_bytes"] >= sum(cell["breakdown"].values()) > 0
        assert 0 < cell["breakdown"]["teacher"] < cell["breakdown"]["parameters"] + cell["breakdown"]["teacher"]
    assert shared["breakdown"]["teacher"] < own["breakdown"]["teacher"]
    assert shared["peak_bytes"] < own["peak_bytes"]
    assert "resident, one prefix" in capsys.readouterr().out


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
    assert load("timing").sum_copies({"traceEvents": events}) == {"host_to_device": 7, "device_to_host": 5}
    with pytest.raises(RuntimeError, match="no device activity"):
        load("timing").sum_copies({"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}]})


def test_phase_peaks_keep_the_highest_of_each_phase(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 7, 6, 2])
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: next(readings))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", resets.append)
    peaks = load("timing").PhasePeaks(torch.device("cuda"))
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

    load(results["benchmark"]).print_report(results)
    assert capsys.readouterr().out.strip() in DOCUMENTATION


def test_cache_clearing_trains_in_rounds(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its figures are those of CUDA's allocator; what runs elsewhere is the training."""
    benchmark = load("planning.cache_clearing")
    monkeypatch.setattr(benchmark, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(benchmark, "SIZES", range(32, 65, 32))
    monkeypatch.setattr(benchmark, "EVERY", 2)
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
    for variant, num_emptied in [("default", 0), ("empty_cache", 2)]:
        row = benchmark.measure({"variant": variant, "steps": 8, "seconds_per_cell": 60.0}, tmp_path)
        assert row["first_step_s"] > 0
        assert len(emptied) == num_emptied


def test_cache_clearing_keeps_what_it_has_when_a_variant_fails(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, output = load("planning.cache_clearing"), tmp_path / "results.json"
    reserved = {"default": 3 * 2**30, "expandable_segments": 2 * 2**30, "default again": 3 * 2**30}

    def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        bytes_of = {"reserved_bytes": reserved[settings["variant"]], "peak_bytes": 2**30, "num_alloc_retries": 0}
        return {"step_ms": {"median": 5.0}, **bytes_of}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "current_device", lambda: torch.device("cuda", 0))
    assert benchmark.main(["--output", str(output)]) == 1
    results = json.loads(output.read_text())
    rows = {row["variant"]: row for row in results["cells"]}
    assert list(rows) == ["default", "empty_cache", "expandable_segments", "default again"]
    assert rows["empty_cache"]["error"] == "KeyError: 'empty_cache'"
    assert rows["default again"]["time_over_default"] == 1
    lost, slower = benchmark.verdicts(results)
    assert (lost.value, lost.outcome) == (0.5, "met")
    assert slower.outcome == "not measured"
    assert "empty_cache: KeyError" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures there")
def test_cache_clearing_says_that_it_needs_cuda(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("planning.cache_clearing").main([]) == 1
    assert "No CUDA device" in capsys.readouterr().out
