import pytest
import torch
from late_imports import LateModule
from torch import Tensor

flow_policy = LateModule("hf_memopt.lerobot.flow.flow_policy")


def straight(ends: Tensor) -> object:
    """Return the field of the straight lines from any point at time 1 to `ends` at time 0."""

    class Straight(flow_policy.ConditionedExpert):
        def __init__(self) -> None: ...

        def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
            return (x_t - ends) / time[:, None, None].clamp_min(1e-6)

    return Straight()


@pytest.fixture
def ends() -> Tensor:
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_steps", [1, 5])
def test_straight_lines_are_followed_to_their_ends(ends: Tensor, noise: Tensor, num_steps: int) -> None:
    noise = noise[:3, :2, :4]
    torch.testing.assert_close(straight(ends).sample(noise, num_steps), ends)


def test_from_noise_couple_is_sample_and_from_actions_the_padding_goes_to_its_noise(noise: Tensor) -> None:
    noise, actions = noise[:3, :2, :4], torch.zeros(3, 2, 4)

    class Shift(flow_policy.ConditionedExpert):
        def __init__(self) -> None: ...

        def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
            return torch.ones_like(x_t)

    from_actions = torch.tensor([True, False, False])
    found, reached = Shift().couple(noise, actions, from_actions, num_steps=4, num_action_dims=3)
    assert torch.equal(found[1:], noise[1:])
    assert torch.equal(reached[1:], Shift().sample(noise, 4)[1:])
    assert torch.equal(found[0, :, :3], torch.ones(2, 3))
    torch.testing.assert_close(found[0, :, 3], noise[0, :, 3])
    assert torch.equal(reached[0], actions[0])


def test_an_observation_is_passed_on_in_lerobots_order() -> None:
    parts = [torch.zeros(1)], [torch.ones(1)], torch.ones(2), torch.ones(3), torch.ones(4)
    assert flow_policy.Observation(*parts).arguments() == parts
