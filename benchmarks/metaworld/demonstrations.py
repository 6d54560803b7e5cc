"""Demonstrations of Meta-World's scripted experts, as a LeRobotDataset, and a baseline: their mean action, repeated."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets.utils import disable_progress_bars, enable_progress_bars
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import ACTION, OBS_IMAGE, OBS_STATE
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.metaworld import REPO_ID
from benchmarks.metaworld.environment import IMAGE_SIZE, DrawnMetaworldEnv

FPS = 80
# The expert mends such pushes, so that a policy has seen how to mend its own errors (DART, arXiv 1703.09327).
HAND_NOISE = 0.5


def record(output: Path, tasks: Sequence[str], episodes_per_task: int, seed: int) -> Path:
    """Write a dataset of successful episodes, the tasks in turn; `seed` is the first scene's, the next has the next."""
    if output.exists():
        raise ValueError(f"output={str(output)!r} exists; name a new folder or remove this one")
    features = {
        OBS_STATE: {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "gripper"]},
        ACTION: {"dtype": "float32", "shape": (4,), "names": ["dx", "dy", "dz", "grip"]},
        OBS_IMAGE: {"dtype": "image", "shape": (IMAGE_SIZE, IMAGE_SIZE, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create(REPO_ID, fps=FPS, features=features, root=output, use_videos=False)
    disable_progress_bars()  # those that `datasets` shows for the few rows of every single episode
    environments = [DrawnMetaworldEnv(task) for task in tasks]
    generator = np.random.default_rng(seed)
    for index in tqdm(range(episodes_per_task * len(tasks)), desc="episodes", unit="ep"):
        environment = environments[index % len(tasks)]
        for frame in expert_episode(environment, seed + index, generator):
            dataset.add_frame({**frame, "task": environment.task_description})
        dataset.save_episode()
    dataset.finalize()
    enable_progress_bars()
    return output


def expert_episode(environment: DrawnMetaworldEnv, seed: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Return the frames of one success: observations, and the expert's actions."""
    observation, _ = environment.reset(seed=seed)
    frames = []
    for _ in range(environment._max_episode_steps):
        action = _expert_action(environment)
        state = observation["agent_pos"].astype(np.float32)
        frames.append({OBS_STATE: state, ACTION: action, OBS_IMAGE: observation["pixels"]})
        pushed = np.clip(action + HAND_NOISE * generator.normal(size=4), -1, 1).astype(np.float32)
        observation, _, terminated, _, _ = environment.step(pushed)
        if terminated:
            return frames
    raise RuntimeError(f"the expert of {environment.task} did not finish in {len(frames)} steps (seed {seed})")


def _expert_action(environment: DrawnMetaworldEnv) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Constant")  # "may be too high": the environment clips, and so does this
        action = environment.expert_policy.get_action(environment.last_state)
    return np.clip(action, -1, 1).astype(np.float32)


def successes_of_mean_action(dataset: LeRobotDataset, task: str, episodes: int, first_seed: int) -> int:
    """Return in how many of the episodes a task succeeds with the mean of its demonstrations' actions in every step.

    A task that this solves proves nothing about a policy: it need not look. Costs about a millisecond a step.
    """
    environment = DrawnMetaworldEnv(task)
    action = mean_action(dataset, environment.task_description)
    return sum(_succeeds(environment, action, first_seed + index) for index in range(episodes))


def mean_action(dataset: LeRobotDataset, description: str) -> NDArray[np.float32]:
    columns = dataset.hf_dataset.with_format("numpy")
    chosen = np.asarray(columns["task_index"]) == dataset.meta.get_task_index(description)
    mean: NDArray[np.float32] = np.asarray(columns[ACTION])[chosen].mean(axis=0)
    return mean


def _succeeds(environment: DrawnMetaworldEnv, action: NDArray[np.float32], seed: int) -> bool:
    environment.reset(seed=seed)
    # In steps that follow a success lerobot's environment has begun another episode: stop there.
    return any(environment.step(action)[2] for _ in range(environment._max_episode_steps))
