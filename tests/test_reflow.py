"""Tests of the mathematics of reflow with closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_imports import LateModule
from torch import Tensor

from hf_memopt.reflow import TIME_SAMPLINGS, interpolate, reflow_loss, sample_time, straightness, velocity_target

flow_matching = LateModule("lerobot.policies.common.flow_matching")


def euler(field, noise: Tensor, num_steps: int) -> Tensor:
    states = [noise]
    for step in range(num_steps):
        states.append(states[-1] - field(states[-1], 1 - step / num_steps) / num_steps)
    return torch.stack(states)


@pytest.fixture
def noise() -> Tensor:
    return torch.randn(32, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_time_one_is_noise_and_time_zero_is_data(noise: Tensor) -> None:
    actions = noise.roll(1)
    assert torch.equal(interpolate(noise, actions, torch.ones(32)), noise)
    assert torch.equal(interpolate(noise, actions, torch.zeros(32)), actions)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_velocity_is_the_derivative_of_the_interpolation(first: float, second: float) -> None:
    noise, actions = torch.randn(2, 5, 3, 2, dtype=torch.float64)
    ends = [interpolate(noise, actions, torch.full((5,), time, dtype=torch.float64)) for time in (first, second)]
    torch.testing.assert_close(ends[1] - ends[0], (second - first) * velocity_target(noise, actions))


def test_one_step_along_the_target_reaches_the_actions(noise: Tensor) -> None:
    actions = noise.roll(1)
    torch.testing.assert_close(noise - velocity_target(noise, actions), actions)


def test_loss_is_zero_at_the_target_and_ignores_padded_dimensions(noise: Tensor) -> None:
    actions = noise.roll(1)
    velocity = velocity_target(noise, actions).clone()
    velocity[..., 2:] += 100
    assert torch.equal(reflow_loss(velocity, noise, actions, num_action_dims=2), torch.zeros(32, dtype=torch.float64))
    velocity[3, :, 0] += 1
    assert reflow_loss(velocity, noise, actions, num_action_dims=2)[3] == pytest.approx(0.5)


def test_straightness_of_a_constant_field_is_zero_and_one_step_is_exact(noise: Tensor) -> None:
    path = euler(lambda x, t: torch.ones_like(x), noise, 10)
    assert straightness(path) < 1e-25
    torch.testing.assert_close(path[0] - 1, path[-1])


def test_straightness_of_a_linear_field_has_its_closed_form(noise: Tensor) -> None:
    # x(t) = x(1) exp(t - 1) for the field v = x; S = E |x(1)|^2 * integral of (exp(t - 1) - (1 - 1/e))^2 dt
    overall = 1 - math.exp(-1)
    integral = (1 - math.exp(-2)) / 2 - 2 * overall * overall + overall**2
    path = euler(lambda x, t: x, noise, 20000)
    assert straightness(path).item() == pytest.approx(noise.square().mean().item() * integral, rel=1e-3)
    assert straightness(path, normalize=True).item() == pytest.approx(integral / overall**2, rel=1e-3)


@pytest.mark.parametrize("sampling", TIME_SAMPLINGS)
def test_times_lie_in_the_unit_interval_and_follow_the_seed(sampling: str) -> None:
    torch.manual_seed(0)
    first = sample_time(10000, sampling)
    torch.manual_seed(0)
    assert torch.equal(first, sample_time(10000, sampling))
    assert first.dtype == torch.float32
    assert first.min() > 0
    assert first.max() <= 1


def test_beta_draws_what_lerobot_draws() -> None:
    torch.manual_seed(0)
    want = flow_matching.sample_time_beta(100, "cpu", alpha=1.5, beta=1.0, scale=0.999, offset=0.001)
    torch.manual_seed(0)
    assert torch.equal(sample_time(100, "beta"), want)


def test_ushaped_has_the_density_of_the_paper() -> None:
    torch.manual_seed(0)
    time = sample_time(400_000, "ushaped").double()
    counts = torch.histc(time, bins=10, min=0, max=1) / len(time)
    edges = torch.linspace(-0.5, 0.5, 11, dtype=torch.float64)
    want = (4 * edges).sinh().diff() / (2 * math.sinh(2))
    torch.testing.assert_close(counts, want, atol=3e-3, rtol=0)


def test_one_is_always_one_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    assert torch.equal(sample_time(5, "one"), torch.ones(5))
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reflow_time_sampling='cosine'.*beta, uniform, ushaped, one"):
        sample_time(4, "cosine")
