"""A comparison of the estimated and the real peak of every recipe's update on the CPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerators
import pytest
import torch
import torch.nn.functional as F
from counted_allocator import CountedAllocator
from plan_toys import causal_lm, fluxflow, lgt, neural_operator, smolvla
from simulated import simulated
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.planning import estimate_peak_memory
from hf_memopt.planning.accounting.categories import TEACHER
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.recipes.common.auto_plan import RecipeWorkload
from hf_memopt.transfer.storage_memory import ResizedMemory

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]

# Both count live storages of the same program to the byte; only an operation's internal memory may differ.
TOLERANCE = 0.001


@contextmanager
def counted_resizing(allocator: CountedAllocator) -> Iterator[None]:
    """Count streamed weights while they have memory: their storages are resized without an operation."""
    give, take = ResizedMemory.give, ResizedMemory.take

    def counted_give(memory: ResizedMemory) -> Tensor:
        if not memory._is_there:
            allocator.move(memory._num_bytes)
        with _disable_current_modes():
            block = give(memory)
        allocator.leave_out(block)
        return block

    def counted_take(memory: ResizedMemory) -> None:
        if memory._is_there:
            allocator.move(-memory._num_bytes)
        take(memory)

    with patch.object(ResizedMemory, "give", counted_give), patch.object(ResizedMemory, "take", counted_take):
        yield


def real_peak_bytes(simulated: SimulatedStep) -> int:
    torch.manual_seed(0)
    allocator = CountedAllocator()
    with allocator, counted_resizing(allocator):
        state = simulated.setup(torch.device("cpu"))
    gc.collect()
    allocator.reset_peaks()
    with allocator, counted_resizing(allocator):
        for _ in range(simulated.num_steps):
            simulated.step(state)
    accelerators.forget_accelerator()
    return allocator.peak_bytes


def deviation(workload: RecipeWorkload, micro_batch: int, **settings: str) -> float:
    """Return the relative deviation from the real peak, positive above the peak."""
    simulated = step_with(workload, micro_batch, **settings)
    estimate = estimate_peak_memory(simulated.setup, simulated.step, like="cpu", num_steps=simulated.num_steps)
    return estimate.peak_bytes / real_peak_bytes(simulated) - 1


def step_with(workload: RecipeWorkload, micro_batch: int, **settings: str) -> SimulatedStep:
    first = {lever.name: lever.values[0] for lever in workload.levers}
    return workload.simulated(first | settings, micro_batch)


Case = tuple[Callable[..., RecipeWorkload], tuple[str, ...], int, dict[str, str]]
KEPT = {"activations": "on the device"}
CHECKPOINTED = {"activations": "checkpointed"}
QUICK: dict[str, Case] = {
    "causal_lm": (causal_lm, (), 8, KEPT),
    "neural_operator": (neural_operator, (), 8, KEPT),
}
CASES: dict[str, Case] = {
    "causal_lm, checkpointed": (causal_lm, (), 8, CHECKPOINTED),
    "causal_lm, accumulating": (causal_lm, ("--gradient_accumulation_steps=2",), 2, KEPT),
    "fluxflow": (fluxflow, (), 4, KEPT),
    "fluxflow, checkpointed": (fluxflow, (), 4, CHECKPOINTED),
    "fluxflow, accumulating": (fluxflow, (), 2, {**KEPT, "average": "on the host"}),
    "lgt": (lgt, (), 8, KEPT),
    "lgt, checkpointed": (lgt, (), 8, CHECKPOINTED),
    "lgt, accumulating": (lgt, (), 2, KEPT),
    "lgt, gradient cache": (lgt, ("--training.gradient_cache=true",), 4, KEPT),
    "neural_operator, checkpointed": (neural_operator, (), 8, {"activations": "all checkpointed"}),
    "neural_operator, accumulating": (neural_operator, (), 4, KEPT),
    "tfno": (neural_operator, ("--model=tfno",), 8, KEPT),
    "uno": (neural_operator, ("--model=uno",), 8, KEPT),
}
STUDENTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "resident": ({}, {"teacher_offload": "resident"}),
    "swap": ({}, {"teacher_offload": "swap"}),
    "stream": ({}, {"teacher_offload": "stream"}),
    "stream, from files": ({"teacher_home": "file"}, {"teacher_offload": "stream"}),
    "swap, prefix of its own": ({"share_prefix": "off"}, {"teacher_offload": "swap"}),
    "stream, prefix of its own": ({"share_prefix": "off"}, {"teacher_offload": "stream"}),
    "bf16, demonstrations": ({"reflow_real_data": 0.5}, {"teacher_offload": "swap", "mixed_precision": "bf16"}),
    "bf16 weights": ({"teacher_dtype": "bfloat16"}, {"teacher_offload": "resident"}),
}


def test_a_peak_is_that_of_a_real_run_quickly(tmp_path: Path) -> None:
    for make, flags, micro_batch, settings in QUICK.values():
        assert abs(deviation(make(tmp_path, *flags), micro_batch, **settings)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_peak_is_that_of_a_real_run(case: Case, tmp_path: Path) -> None:
    make, flags, micro_batch, settings = case
    assert abs(deviation(make(tmp_path, *flags), micro_batch, **settings)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", STUDENTS.values(), ids=STUDENTS)
def test_a_peak_beside_a_teacher_is_that_of_a_real_run(
    case: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, toy_vlm: Path
) -> None:
    fields, settings = case
    workload = smolvla(tmp_path, toy_vlm, {"effective_batch": 4}, **fields)
    assert abs(deviation(workload, 2, **settings)) < TOLERANCE


@pytest.mark.slow
def test_a_teacher_on_the_virtual_device_takes_its_bytes_there_and_on_the_host(tmp_path: Path, toy_vlm: Path) -> None:
    workload = smolvla(tmp_path, toy_vlm, {"effective_batch": 4})
    estimates = {}
    for mode in ("resident", "swap", "stream"):
        simulated = step_with(workload, 2, teacher_offload=mode)
        estimates[mode] = estimate_peak_memory(simulated.setup, simulated.step, num_steps=simulated.num_steps)
    resident, swap, stream = estimates.values()
    own_bytes = swap.host_bytes - resident.host_bytes
    assert resident.phases["optimizer"] - swap.phases["optimizer"] == own_bytes
    # Buffers stay.
    assert resident.breakdown[TEACHER] - stream.breakdown[TEACHER] == own_bytes
    assert own_bytes <= stream.host_bytes - resident.host_bytes < 1.01 * own_bytes
    # The next copy of swapped weights begins as soon as a micro-batch ends.
    assert stream.phases["between passes"] < swap.phases["between passes"]
    assert stream.peak_bytes < swap.peak_bytes <= resident.peak_bytes


def test_reduced_losses_keep_the_memory_of_each_element() -> None:
    losses = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.huber_loss, F.l1_loss)

    def storage_bytes(device: torch.device) -> list[int]:
        first, second = torch.ones(8, 16, device=device), torch.ones(16, device=device).expand(8, 16)
        return [loss(first, second).untyped_storage().nbytes() for loss in losses]

    assert simulated(storage_bytes) == storage_bytes(torch.device("cpu"))
