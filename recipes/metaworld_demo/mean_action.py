"""The baseline that sees nothing: the mean action of a task's demonstrations, repeated until the episode ends."""

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from hf_memopt.recipes.metaworld_demo.environment import DrawnMetaworldEnv


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
