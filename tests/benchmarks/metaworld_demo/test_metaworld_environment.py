"""Tests of Meta-World with a drawn camera. Skipped without the extra `metaworld`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule

environment = LateModule("benchmarks.metaworld.environment")
demonstrations = LateModule("benchmarks.metaworld.demonstrations")
env_utils = LateModule("lerobot.envs.utils")
lerobot_dataset = LateModule("lerobot.datasets.lerobot_dataset")

TASK = "reach-v3"


@pytest.fixture(scope="module", autouse=True)
def _metaworld() -> None:
    pytest.importorskip("metaworld", reason="the extra 'metaworld' is not installed")


@pytest.fixture(scope="module")
def reach() -> Any:
    return environment.DrawnMetaworldEnv(TASK)


def test_the_image_shows_where_things_are() -> None:
    left, right = (-0.3, 0.5, 0.1), (0.3, 0.9, 0.4)
    image = environment.draw_image(hand=left, goal=right, thing=left)
    assert image.shape == (environment.IMAGE_SIZE, environment.IMAGE_SIZE, 3)
    half = environment.IMAGE_SIZE // 2
    for view in (image[:half], image[half:]):  # from above, from the front
        (hand_row, hand_column), (goal_row, goal_column) = (
            np.unravel_index(view[..., channel].argmax(), view.shape[:2]) for channel in (0, 1)
        )
        assert hand_column < environment.IMAGE_SIZE // 4 < goal_column
        assert hand_row > goal_row  # nearer, and lower
    assert np.array_equal(image[..., 0], image[..., 2])


def test_a_task_that_meta_world_does_not_have_is_refused() -> None:
    environment.check_task(TASK)
    with pytest.raises(ValueError, match=r"^tasks='reach' is none of Meta-World's; similar names: .*reach-v3"):
        environment.check_task("reach")


def test_observations_are_lerobots_and_seeds_decide(reach: Any) -> None:
    first, _ = reach.reset(seed=3)
    other, _ = reach.reset(seed=4)
    again, _ = reach.reset(seed=3)
    assert np.array_equal(first["pixels"], again["pixels"])
    assert not np.array_equal(first["pixels"], other["pixels"])
    assert np.array_equal(first["agent_pos"], reach.last_state[:4])
    batch = env_utils.preprocess_observation({name: value[None] for name, value in first.items()})
    features = env_utils.env_to_policy_features(environment.DrawnMetaworldConfig(task=TASK))
    assert {name: tuple(batch[name].shape[1:]) for name in batch} == {
        name: feature.shape for name, feature in features.items() if name != "action"
    }


def test_copies_run_in_turn_and_stop_when_they_are_done() -> None:
    vector = environment.DrawnMetaworldConfig(task=f"{TASK},drawer-close-v3").create_envs(2)
    assert list(vector) == [TASK, "drawer-close-v3"]
    observation, _ = vector[TASK][0].reset(seed=[0, 1])
    assert observation["pixels"].shape == (2, environment.IMAGE_SIZE, environment.IMAGE_SIZE, 3)
    assert vector[TASK][0].call("_max_episode_steps") == (environment.MAX_STEPS,) * 2


def test_an_episode_of_the_expert_ends_at_the_goal(reach: Any) -> None:
    frames = demonstrations.expert_episode(reach, 5, np.random.default_rng(0))
    assert 5 < len(frames) < environment.MAX_STEPS
    states = np.stack([frame["observation.state"] for frame in frames])
    actions = np.stack([frame["action"] for frame in frames])
    assert np.abs(actions).max() <= 1
    reach.reset(seed=5)
    goal = reach._env._target_pos
    assert np.linalg.norm(states[-1, :3] - goal) < 0.1 < np.linalg.norm(states[0, :3] - goal)


def test_recorded_frames_are_what_the_environment_showed(tmp_path: Path) -> None:
    root = demonstrations.record(tmp_path / "dataset", [TASK, "drawer-close-v3"], 1, seed=7)
    dataset = lerobot_dataset.LeRobotDataset(demonstrations.REPO_ID, root=root)
    assert dataset.num_episodes == 2
    reach = environment.DrawnMetaworldEnv(TASK)
    frames = demonstrations.expert_episode(reach, 7, np.random.default_rng(7))
    for index in (0, len(frames) - 1):
        item = dataset[index]
        image = torch.from_numpy(frames[index]["observation.image"]).permute(2, 0, 1) / 255
        assert torch.equal(item["observation.image"], image)
        assert torch.equal(item["action"], torch.from_numpy(frames[index]["action"]))
        assert item["task"] == reach.task_description
    assert dataset[len(frames)]["task"] == environment.DrawnMetaworldEnv("drawer-close-v3").task_description
    with pytest.raises(ValueError, match="exists; name a new folder"):
        demonstrations.record(root, [TASK], 1, seed=7)
