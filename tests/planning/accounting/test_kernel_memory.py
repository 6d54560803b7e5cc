"""Memory that kernels take beside their results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimate_runs import State, step
from torch import nn

from hf_memopt.planning import estimate_peak_memory
from hf_memopt.units import KIB, MIB

WORKSPACE = 8320 * KIB


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def training(
    module: Callable[[], nn.Module],
    shape: tuple[int, ...],
    loss: Callable[..., torch.Tensor] = mean_square,
    dtype: torch.dtype = torch.float32,
) -> Callable[[torch.device], State]:
    def setup(device: torch.device) -> State:
        with device:
            model, inputs = module(), torch.zeros(shape, dtype=dtype)
        return State(model, torch.optim.SGD(model.parameters()), (inputs,), loss)

    return setup


def workspaces(module: Callable[[], nn.Module], gpu: str = "t4", rows: int = 8) -> dict[str, int]:
    estimate = estimate_peak_memory(training(module, (rows, 64)), step, gpu=gpu)
    found: dict[str, int] = {}
    for tensor in estimate.top:
        if tensor.kind == "library workspaces":
            found[tensor.owner] = found.get(tensor.owner, 0) + tensor.count * tensor.num_bytes
    assert sum(found.values()) == estimate.breakdown["library workspaces"]
    return found


def linear(*, bias: bool) -> nn.Module:
    return nn.Linear(64, 64, bias=bias)


@pytest.mark.parametrize(("gpu", "each"), [("t4", WORKSPACE), ("a100", WORKSPACE), ("h100", 32 * MIB)])
def test_forward_and_backward_have_a_handle_each(gpu: str, each: int) -> None:
    assert workspaces(lambda: linear(bias=False), gpu=gpu) == {"cuBLAS": 2 * each}


def test_a_product_that_adds_a_bias_takes_one_of_cublaslt() -> None:
    # Backward multiplies without a bias, so its handle takes no cuBLASLt workspace.
    assert workspaces(lambda: linear(bias=True)) == {"cuBLAS": 2 * WORKSPACE, "cuBLASLt": MIB}


def test_recomputing_in_backward_takes_one_there_too() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Recomputing stops at the second layer, whose input is the last tensor that backward needs.
            self.inner = nn.Sequential(linear(bias=True), linear(bias=True))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    assert workspaces(Checkpointed) == {"cuBLAS": 2 * WORKSPACE, "cuBLASLt": 2 * MIB}


def test_a_row_is_multiplied_without_cublaslt() -> None:
    assert workspaces(lambda: linear(bias=True), rows=1) == {"cuBLAS": 2 * WORKSPACE}


def test_what_runs_on_the_host_takes_none() -> None:
    def on_host(state: State) -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)
        state.model.weight.square().mean().backward()
        state.optimizer.step()

    def setup(device: torch.device) -> State:
        with device:
            model = linear(bias=False)
        return State(model, torch.optim.SGD(model.parameters()), (), lambda model: model.weight.mean())

    assert "library workspaces" not in estimate_peak_memory(setup, on_host).breakdown


def test_a_step_without_products_takes_none() -> None:
    found = estimate_peak_memory(training(lambda: nn.LayerNorm(64), (8, 64)), step)
    assert "library workspaces" not in found.breakdown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_backward_of_softmax_makes_a_product_for_itself(dtype: torch.dtype) -> None:
    num_bytes = 64 * MIB

    def softmax(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(model(x), -1, dtype=torch.float32).sum()

    setup = training(lambda: nn.LayerNorm(1024, dtype=dtype), (num_bytes // 4096, 1024), softmax, dtype)
    at_peak = estimate_peak_memory(setup, step)
    assert at_peak.phase == "backward"
    assert ("softmax's backward", num_bytes) in {(tensor.owner, tensor.num_bytes) for tensor in at_peak.top}


def test_the_backward_of_ctc_makes_a_table_like_forwards() -> None:
    frames, labels, samples = 4096, 256, 2

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        targets = torch.zeros(samples, labels, dtype=torch.long, device=x.device)
        lengths = [torch.full((samples,), length, device=x.device) for length in (frames, labels)]
        return nn.functional.ctc_loss(model(x).log_softmax(-1), targets, *lengths)

    at_peak = estimate_peak_memory(training(lambda: nn.Linear(4, 4), (frames, samples, 4), loss), step)
    assert at_peak.phase == "backward"
    table = samples * frames * (2 * labels + 1) * 4
    assert ("CTC's backward", table) in {(tensor.owner, tensor.num_bytes) for tensor in at_peak.top}


@pytest.mark.parametrize(("expanded", "each"), [(False, 8), (True, 9)])
def test_masked_scatter_counts_the_elements_of_its_mask(expanded: bool, each: int) -> None:
    rows, columns = 2048, 1024

    def scatter(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(rows, 1 if expanded else columns, dtype=torch.bool, device=x.device)
        x.masked_scatter(mask.expand(rows, columns), x)
        return model(torch.zeros(1, 1, device=x.device)).sum()

    at_peak = estimate_peak_memory(training(lambda: nn.Linear(1, 1), (rows, columns), scatter), step)
    found = {(tensor.owner, tensor.num_bytes) for tensor in at_peak.top}
    assert ("masked_scatter's prefix sum", each * rows * columns) in found
