"""Questions that only values could answer: the assumptions, and the refusals."""

from collections.abc import Callable

import pytest
import torch
from estimate_runs import State, mlp_setup, step
from torch import Tensor, nn

from hf_memopt.planning.estimate import estimate_peak_memory


def selecting(chosen: Callable[[Tensor], Tensor]) -> Callable[[torch.device], State]:
    def setup(device: torch.device) -> State:
        return mlp_setup(device)._replace(loss=lambda model, x: chosen(model(x)).square().mean())

    return setup


def test_what_depends_on_values_is_assumed_and_said() -> None:
    def positive(output: Tensor) -> Tensor:
        copies = torch.stack([output] * 20)
        return copies[copies > 0]

    setup = selecting(positive)
    found = estimate_peak_memory(setup, step)
    assert found.confidence == "medium"
    assert "100%" in found.assumptions[0]


def test_numbers_that_are_read_for_logging_cost_no_confidence() -> None:
    def logging(state: State) -> None:
        assert state.loss(state.model, *state.inputs).item() == 1.0
        assert state.inputs[0][0, :2].cpu().numpy().tolist() == [1.0, 1.0]
        step(state)

    assert estimate_peak_memory(mlp_setup, logging).confidence == "high"


@torch.library.custom_op("planning_test::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.clone()


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return without_fake(x)


def test_an_operation_without_fake_implementation_is_named_with_its_module() -> None:
    def setup(device: torch.device) -> State:
        state = mlp_setup(device)
        state.model.insert(1, Opaque())
        return state

    with pytest.raises(ValueError, match=r"planning_test.without_fake.*in module '1'.*register_fake"):
        estimate_peak_memory(setup, step)
