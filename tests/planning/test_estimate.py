"""Estimates of a small network: sizes computed by hand, assumptions, and refusals."""

from functools import partial

import pytest
import torch
from estimate_runs import BATCH, HIDDEN, WIDTH, State, accumulating, adamw, mlp_setup, step
from torch import nn

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory

# Bytes. Both weights are of the same size, and every tensor but scalars is a multiple of 512 bytes.
WEIGHTS = 2 * WIDTH * HIDDEN * 4
INPUTS = BATCH * WIDTH * 4
HIDDENS = BATCH * HIDDEN * 4
SCALAR = 512
# cuBLAS's workspace, one each of forward and backward; the network has no biases.
WORKSPACE = 8320 * 1024
FUSED = partial(torch.optim.AdamW, fused=True)


@pytest.fixture(scope="module")
def fused() -> MemoryEstimate:
    return estimate_peak_memory(partial(mlp_setup, make_optimizer=FUSED), step)


@pytest.fixture(scope="module")
def foreach() -> MemoryEstimate:
    """Estimate with foreach, torch's default on CUDA."""
    return estimate_peak_memory(partial(mlp_setup, make_optimizer=torch.optim.AdamW), step)


@pytest.fixture(scope="module")
def accumulated() -> MemoryEstimate:
    return estimate_peak_memory(partial(mlp_setup, make_optimizer=FUSED), accumulating)


def test_the_fused_optimizer_needs_no_room_of_its_own(fused: MemoryEstimate) -> None:
    # The fused kernel keeps its step counts on the device.
    assert fused.phases["optimizer"] == 4 * WEIGHTS + INPUTS + 2 * SCALAR + 2 * WORKSPACE
    assert fused.breakdown["parameters"] == WEIGHTS
    assert fused.breakdown["gradients"] == WEIGHTS
    assert fused.breakdown["optimizer state"] == 2 * WEIGHTS + 2 * SCALAR
    assert fused.breakdown["inputs"] == INPUTS
    assert fused.breakdown["library workspaces"] == 2 * WORKSPACE


def test_with_it_the_peak_is_at_the_end_of_the_second_backward(fused: MemoryEstimate) -> None:
    # The loss, its gradient and the hidden layer's gradient are alive when the last weight's gradient is made.
    assert (fused.phase, fused.step) == ("backward", 2)
    assert fused.peak_bytes == fused.phases["optimizer"] + HIDDENS + 2 * SCALAR


def test_the_foreach_optimizer_sets_the_peak_with_a_copy_of_all_weights(foreach: MemoryEstimate) -> None:
    assert (foreach.phase, foreach.step) == ("optimizer", 1)
    assert foreach.peak_bytes == 5 * WEIGHTS + INPUTS + 2 * WORKSPACE
    assert foreach.breakdown["temporaries"] == WEIGHTS
    # The foreach optimizer's step counts are on the host.
    assert foreach.breakdown["optimizer state"] == 2 * WEIGHTS


def test_the_peak_of_forward_is_where_relu_has_its_input_and_output(fused: MemoryEstimate) -> None:
    assert fused.phases["forward"] == 3 * WEIGHTS + INPUTS + 2 * SCALAR + 2 * HIDDENS + 2 * WORKSPACE


def test_accumulation_keeps_gradients_through_forward(fused: MemoryEstimate, accumulated: MemoryEstimate) -> None:
    assert accumulated.phases["forward"] == fused.phases["forward"] + WEIGHTS
    assert accumulated.phases["optimizer"] == fused.phases["optimizer"]


def test_without_state_the_first_step_is_as_high_as_the_second() -> None:
    estimate = estimate_peak_memory(partial(mlp_setup, make_optimizer=partial(torch.optim.SGD, lr=0.1)), step)
    assert (estimate.phase, estimate.step) == ("backward", 1)
    assert "optimizer state" not in estimate.breakdown
    assert estimate.peak_bytes == 2 * WEIGHTS + INPUTS + HIDDENS + 2 * SCALAR + 2 * WORKSPACE


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    def setup(device: torch.device) -> State:
        state = mlp_setup(device)
        state.model[0].requires_grad_(False)
        return state._replace(optimizer=FUSED([state.model[2].weight]))

    estimate = estimate_peak_memory(setup, step)
    assert estimate.breakdown["frozen parameters"] == estimate.breakdown["parameters"] == WEIGHTS / 2
    assert estimate.breakdown["gradients"] == WEIGHTS / 2
    assert estimate.breakdown["optimizer state"] == WEIGHTS + SCALAR
    assert estimate.confidence == "high"


def test_half_precision_weights_are_half_as_large() -> None:
    def setup(device: torch.device) -> State:
        state = mlp_setup(device)
        state.model.bfloat16()
        return state._replace(inputs=tuple(each.bfloat16() for each in state.inputs))

    assert estimate_peak_memory(setup, step).breakdown["parameters"] == WEIGHTS / 2


def test_a_model_that_moves_after_its_optimizer_was_made_is_the_same(foreach: MemoryEstimate) -> None:
    def setup(device: torch.device) -> State:
        state = mlp_setup(torch.device("cpu"), torch.optim.AdamW)
        state.model.to(device)
        return state._replace(inputs=tuple(each.to(device) for each in state.inputs))

    moved = estimate_peak_memory(setup, step)
    assert (moved.peak_bytes, moved.phases, moved.breakdown) == (foreach.peak_bytes, foreach.phases, foreach.breakdown)


def test_the_largest_tensors_have_owners_and_the_breakdown_adds_up(fused: MemoryEstimate) -> None:
    assert sum(fused.breakdown.values()) == fused.peak_bytes
    largest = [(tensor.kind, tensor.owner) for tensor in fused.top[:10]]
    assert (largest[0], fused.top[0].count) == (("library workspaces", "cuBLAS"), 2)
    assert {("parameters", "0.weight"), ("parameters", "2.weight"), ("gradients", "2.weight")} <= set(largest)
    assert fused.top[1].num_bytes == WEIGHTS / 2


def test_it_fits_where_the_allocator_gets_through(fused: MemoryEstimate) -> None:
    assert fused.reserved_bytes == (2 + 20) * 2**20  # a segment of small tensors, and both workspaces
    assert fused.trace.fits(fused.reserved_bytes)
    assert not fused.trace.fits(fused.reserved_bytes - 1)


def test_a_card_gives_times_and_changes_no_bytes(fused: MemoryEstimate) -> None:
    timed = estimate_peak_memory(partial(mlp_setup, make_optimizer=FUSED), step, gpu="rtx4090")
    assert (timed.peak_bytes, timed.phases) == (fused.peak_bytes, fused.phases)
    assert timed.step_ms is not None
    assert timed.step_ms > 0
    assert fused.step_ms is None


def test_parameters_that_are_not_reached_are_named() -> None:
    def setup(device: torch.device) -> State:
        state = mlp_setup(device)
        state.model.register_module("spare", nn.Linear(4, 4, device=device))
        return state._replace(loss=lambda model, x: model[2](model[0](x)).square().mean(), optimizer=adamw(
            list(state.model.parameters())))  # fmt: skip

    estimate = estimate_peak_memory(setup, step)
    assert estimate.confidence == "low"
    assert estimate.unreached == ("spare.weight", "spare.bias")


def test_a_step_without_gradients_is_refused() -> None:
    def forward_only(state: State) -> None:
        state.loss(state.model, *state.inputs)

    with pytest.raises(ValueError, match=r"no trainable parameter got a gradient.*call backward"):
        estimate_peak_memory(mlp_setup, forward_only)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="like='tpu' is unknown"):
        estimate_peak_memory(mlp_setup, step, like="tpu")


def test_this_process_stays_as_it_was() -> None:
    seams = torch.nn.functional.scaled_dot_product_attention, nn.Module._apply, torch.autocast.__init__
    random_state = torch.get_rng_state()
    estimate_peak_memory(mlp_setup, step)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not torch.cuda.is_initialized()
    assert seams == (
        torch.nn.functional.scaled_dot_product_attention,
        nn.Module._apply,
        torch.autocast.__init__,
    )
