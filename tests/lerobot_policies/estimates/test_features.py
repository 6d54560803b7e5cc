"""Cameras, states and actions that a policy's configuration or a spec names."""

from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

from hf_memopt.jobs import JobSpec

policy_toys = LateModule("policy_toys")
training_config = LateModule("hf_memopt.lerobot.estimates.training_config")
NONE = {"input_features": {}, "output_features": {}}


def shapes(policy: Any, **said: Any) -> dict[str, tuple[int, ...]]:
    training_config.set_features(policy, JobSpec("policy", **said))
    return {name: tuple(each.shape) for name, each in {**policy.input_features, **policy.output_features}.items()}


def test_features_of_the_configuration_stay(toy_vlm: Path) -> None:
    given = {"observation.state": (2,), "observation.images.top": (3, 32, 32), "action": (2,)}
    assert shapes(policy_toys.policy_config("smolvla", toy_vlm)) == given


def test_a_spec_sets_number_and_size_of_cameras(toy_vlm: Path) -> None:
    others = {"observation.state": (2,), "action": (2,)}
    policy = policy_toys.policy_config("smolvla", toy_vlm)
    assert shapes(policy, image_size="48x64") == {"observation.images.top": (3, 48, 64), **others}
    two = {f"observation.images.camera{number}": (3, 48, 64) for number in (1, 2)}
    assert shapes(policy, images_per_sample=2) == {**two, **others}


def test_without_features_state_and_actions_are_as_wide_as_they_may_be(toy_vlm: Path) -> None:
    policy = policy_toys.policy_config("pi0", toy_vlm, **NONE)
    given = {"observation.images.camera1": (3, 48, 48), "observation.state": (4,), "action": (4,)}
    assert shapes(policy, image_size="48") == given


def test_what_only_a_dataset_says_is_asked_for(toy_vlm: Path) -> None:
    with pytest.raises(ValueError, match=r"^model='policy': its input_features name no camera, as lerobot takes them"):
        shapes(policy_toys.policy_config("smolvla", toy_vlm, **NONE), images_per_sample=2)
    with pytest.raises(ValueError, match=r"^policy type 'act': its configuration lacks observation.state, as lerobot"):
        shapes(policy_toys.policy_config("act", toy_vlm, **NONE), image_size="48")
