from pathlib import Path

import pytest
import torch
from late_imports import LateModule

rollouts = LateModule("hf_memopt.lerobot.evaluate.rollouts")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")


def test_success_is_the_environments_verdict_and_each_chunk_takes_its_steps(
    toy_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_evaluations = 0
    denoise = modeling_smolvla.VLAFlowMatching.denoise_step

    def counted(*arguments: object, **kwargs: object) -> object:
        nonlocal num_evaluations
        num_evaluations += 1
        return denoise(*arguments, **kwargs)

    monkeypatch.setattr(modeling_smolvla.VLAFlowMatching, "denoise_step", counted)
    state = torch.get_rng_state()
    found = rollouts.evaluate_in_environment(
        str(toy_student), "tiny_environment:ReachTheImpossible-v0", [1, 4], num_episodes=3
    )
    assert found == dict.fromkeys([1, 4], rollouts.RolloutResult(3, 0.0, 3.0))
    assert num_evaluations == 1 + 4  # one chunk of eight actions lasts the whole episode
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Nowhere-v0", "register it, or name its package"),
        ("no_such_package:Reach-v0", "No module named 'no_such_package'"),
        ("tiny_environment:ReachForever-v0", "no limit of steps"),
    ],
)
def test_unusable_environments_are_refused(toy_student: Path, env_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollouts.evaluate_in_environment(str(toy_student), env_id, [1])


def test_the_environment_is_looked_at_before_the_policy() -> None:
    with pytest.raises(ValueError, match="env='Nowhere-v0'"):
        rollouts.evaluate_in_environment("/no/such/policy", "Nowhere-v0", [1])
    with pytest.raises(ValueError, match="'/no/such/policy' is neither a checkpoint folder nor a hub id"):
        rollouts.evaluate_in_environment("/no/such/policy", "tiny_environment:Reach-v0", [1])


@pytest.mark.parametrize("num_episodes", [0, -1])
def test_there_is_at_least_one_episode(num_episodes: int) -> None:
    with pytest.raises(ValueError, match=f"num_episodes={num_episodes}.*1"):
        rollouts.evaluate_in_environment("unused", "tiny_environment:Reach-v0", [1], num_episodes=num_episodes)
