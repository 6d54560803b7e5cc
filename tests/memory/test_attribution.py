"""The kind and the owner of each live tensor of a toy step."""

from typing import Any

import pytest
import torch
from alone import hide_what_is_alive
from oom_toys import BATCH, DIM, Step
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_memopt.memory.attribution import (
    BUFFER,
    GRADIENT,
    OPTIMIZER_STATE,
    PARAMETER,
    SAVED,
    live_optimizers,
    live_tensors,
)


@pytest.fixture(autouse=True)
def alone(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_what_is_alive(monkeypatch)


def live_by_kind(model: nn.Module) -> dict[str, int]:
    totals: dict[str, int] = {}
    for group in live_tensors(model, "cpu"):
        totals[group.kind] = totals.get(group.kind, 0) + group.num_bytes
    return totals


def test_kinds_are_complete_and_exact_to_the_byte() -> None:
    step = Step()
    parameter_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    before = live_by_kind(step.model)
    loss = step.model(step.x).sum()
    after = live_by_kind(step.model)
    assert after[PARAMETER] == parameter_bytes
    assert after[BUFFER] == 3 * DIM * 4
    # Two moments of each parameter, and a count of steps in four bytes.
    assert after[OPTIMIZER_STATE] == 2 * parameter_bytes + 4 * len(list(step.model.parameters()))
    assert GRADIENT not in after
    # Each block: input and statistics of the norm, input of up, output of tanh (the input of down), input of scale.
    per_block = BATCH * (DIM + 1 + 1 + DIM + 4 * DIM) * 4
    assert SAVED not in before
    assert after[SAVED] == 3 * per_block
    loss.backward()
    assert live_by_kind(step.model)[GRADIENT] == parameter_bytes
    owners = {group.owner for group in live_tensors(step.model, "cpu") if group.kind == GRADIENT}
    assert owners == {name for name, _ in step.model.named_parameters()}


def test_saved_activations_are_named_after_their_modules() -> None:
    step = Step()
    loss = step.model(step.x).sum()
    owners = {group.owner: group for group in live_tensors(step.model, "cpu") if group.kind == SAVED}
    hidden = owners["1.down (Addmm)"] if "1.down (Addmm)" in owners else owners["after 1.up (Tanh)"]
    assert (hidden.shape, hidden.num_bytes) == ((BATCH, 4 * DIM), BATCH * 4 * DIM * 4)
    assert any(owner.startswith("2.norm (NativeLayerNorm)") for owner in owners)
    assert loss.requires_grad


def test_frozen_layers_are_recognised_by_the_weights_that_they_save() -> None:
    base, adapter = nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)
    model = nn.ModuleDict({"adapter": adapter, "base": base})
    y = base(torch.tanh(adapter(torch.randn(BATCH, DIM))))
    z = (y * y).sum()
    owners = {group.owner for group in live_tensors(model, "cpu") if group.kind == SAVED}
    assert {"after adapter (Tanh)", "after base (Mul)"} <= owners
    assert z.requires_grad


def test_a_first_layer_is_recognised_by_its_input_weight() -> None:
    # The input needs no gradient, so the layer saves its input and not its weight.
    model = nn.Sequential(nn.Linear(DIM, 3, bias=False))
    y = model(torch.randn(BATCH + 1, DIM))
    saved = [group for group in live_tensors(model, "cpu") if group.kind == SAVED and group.shape == (BATCH + 1, DIM)]
    assert [group.owner for group in saved] == ["0 (Mm)"]
    assert y.requires_grad


def test_other_devices_do_not_count() -> None:
    step = Step()
    assert live_tensors(step.model, "cpu")
    assert live_tensors(step.model, "cuda") == []


def test_what_a_pack_hook_wrapped_is_found_without_unpacking() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def unpack(box: Box) -> Tensor:
        raise AssertionError("unpacked")

    x = torch.randn(BATCH, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Box, unpack):
        y = torch.tanh(x * 2)
    saved = [group for group in live_tensors(None, "cpu") if group.kind == SAVED and group.shape == (BATCH, DIM)]
    assert any(group.owner == "(Tanh)" for group in saved)
    assert y.requires_grad


class WrappedOptimizer(torch.optim.Optimizer):
    """A wrapper like Accelerate's: an optimizer by type, with another one's groups and state inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_a_wrapped_optimizer_counts_once() -> None:
    step = Step()
    wrapped = WrappedOptimizer(step.optimizer)
    assert [one for one in live_optimizers() if one.param_groups is wrapped.param_groups] in (
        [wrapped],
        [step.optimizer],
    )


def test_wrapped_tensors_count_as_what_they_wrap() -> None:
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.randn(1000), torch.randn(1000)))

    model = Sharded()
    groups = [group for group in live_tensors(model, "cpu") if group.owner == "weight"]
    assert [(group.kind, group.count, group.num_bytes) for group in groups] == [(PARAMETER, 2, 2 * 4000)]
    assert not [group for group in live_tensors(None, "cpu") if group.kind == PARAMETER and group.shape == (1000,)]
