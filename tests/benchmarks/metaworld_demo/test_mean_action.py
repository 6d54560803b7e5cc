"""Tests of the blind baseline. Those that act are skipped without the extra `metaworld`."""

from typing import Any

import numpy as np
import pytest
from late_imports import LateModule

MODULE = "benchmarks.metaworld.demonstrations"
demonstrations = LateModule(MODULE)
lerobot_dataset = LateModule("lerobot.datasets.lerobot_dataset")

TASKS = ("handle-press-v3", "button-press-topdown-v3")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("metaworld", reason="the extra 'metaworld' is not installed")
    root = demonstrations.record(tmp_path_factory.mktemp("blind") / "dataset", TASKS, 2, seed=0)
    return lerobot_dataset.LeRobotDataset(demonstrations.REPO_ID, root=root)


def test_the_mean_is_of_one_tasks_frames(dataset: Any) -> None:
    frames = dataset.hf_dataset.with_format("numpy")
    actions, tasks = np.asarray(frames["action"]), np.asarray(frames["task_index"])
    for description in dataset.meta.tasks.index:
        chosen = actions[tasks == dataset.meta.get_task_index(description)]
        assert 0 < len(chosen) < len(actions)
        assert np.array_equal(demonstrations.mean_action(dataset, description), chosen.mean(axis=0))


def test_the_same_movement_presses_a_handle_and_standing_still_does_not(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # About the mean of 40 demonstrations.
    for action, successes in (((-0.04, 0.06, -0.41, -1.0), 3), ((0.0, 0.0, 0.0, 0.0), 0)):
        monkeypatch.setattr(f"{MODULE}.mean_action", lambda *_, action=action: np.float32(action))
        assert demonstrations.successes_of_mean_action(dataset, TASKS[0], 3, 100_000) == successes
