"""Runs of the teacher benchmark's part for accelerators, at toy size."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmark_runs import NO_LIMIT, Load, results_of
from fake_cuda.device import is_loaded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_teacher_offload(load: Load, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("teacher.offload")
    if is_loaded():  # the fake GPU has no profiler

        def without_profiler(step: Callable[[], object]) -> dict[str, int]:
            step()
            return {"host_to_device": 0, "device_to_host": 0}

        monkeypatch.setattr(benchmark, "copied_bytes", without_profiler)
    modes = ["resident", "swap", "resident again"]
    sizes = ["--size", "toy", "--batch-sizes", "2", "--dtypes", "float32", "--warmup", "1", "--steps", "2"]
    assert benchmark.main([*sizes, NO_LIMIT, "--output", str(output), "--modes", *modes]) == 0
    cells = results_of(output)["cells"]
    assert [cell["mode"] for cell in cells] == modes
    for cell in cells:
        assert cell["target_equal"]
        assert cell["loss_equal"]
        assert cell["step_ms"]["num_steps"] == 2
        assert cell["samples_per_s"] == 2e3 / cell["step_ms"]["median"]
        assert {"teacher", "forward", "backward", "optimizer"} <= cell["peak_device_bytes"].keys()
        highest = max(cell["peak_device_bytes"].values())
        assert 0 < highest <= 1.01 * cell["peak_bytes"] <= 1.01 * cell["reserved_bytes"]
        assert cell["num_alloc_retries"] >= 0


@pytest.mark.parametrize("mode", ["diffusers-block", "accelerate"])
def test_another_librarys_teacher_gives_bitwise_the_resident_target(mode: str, load: Load, tmp_path: Path) -> None:
    """Compare two targets of two Euler steps: diffusers prefetches from the second target on."""
    benchmark, modes = load("teacher.offload"), load("teacher.modes")
    size, targets = benchmark.SIZES["toy"], {}
    for name in ("resident", mode):
        policy, checkpoint = benchmark.start(size, tmp_path)
        policy.model.config.num_steps = 2
        source = modes.Source(policy, checkpoint, torch.device("cuda", 0), torch.float32)
        handling = modes.MODES[name](source)
        work = benchmark.prepare(handling, source, size, 2)
        observation = benchmark.observe(handling.student, work.batch)
        targets[name] = [handling.target(observation, work.noise).cpu() for _ in range(2)]
    for found, expected in zip(targets[mode], targets["resident"], strict=True):
        assert torch.equal(found, expected)


def test_accelerates_weights_are_page_locked(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload, benchmark, modes = Mock(), load("teacher.offload"), load("teacher.modes")
    monkeypatch.setattr("accelerate.cpu_offload", offload)
    policy, checkpoint = benchmark.start(benchmark.SIZES["toy"], tmp_path)
    modes.MODES["accelerate"](modes.Source(policy, checkpoint, torch.device("cuda", 0), torch.float32))
    assert all(tensor.is_pinned() for tensor in offload.call_args.kwargs["state_dict"].values())
