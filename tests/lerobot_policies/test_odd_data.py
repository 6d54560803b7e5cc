"""Tests of datasets as people have them: many joints, odd cameras, short episodes, other kinds of normalisation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule

pytestmark = pytest.mark.e2e

datasets = LateModule("lerobot.datasets")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
lerobot_configs = LateModule("lerobot.configs")
measure = LateModule("hf_memopt.lerobot.evaluate.measure")
modeling = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
reflow_students = LateModule("reflow_students")
runs = LateModule("lerobot_runs")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")

Frame = dict[str, Any]
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."


def vector(size: int, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": (size,), "names": [f"joint{index}" for index in range(size)]}


def image(height: int, width: int) -> dict[str, Any]:
    return {"dtype": "image", "shape": (height, width, 3), "names": ["height", "width", "channels"]}


@dataclass
class Robot:
    joints: int = 2
    dtype: str = "float32"
    cameras: dict[str, tuple[int, int]] = field(default_factory=lambda: {"top": (32, 32)})
    lengths: tuple[int, ...] = (8,)
    tasks: tuple[str, ...] = ("reach the goal",)
    change: Callable[[Frame], None] = lambda frame: None
    flags: tuple[str, ...] = ()

    def write(self, root: Path) -> Path:
        features: dict[str, Any] = {name: vector(self.joints, self.dtype) for name in (STATE, ACTION)}
        features |= {IMAGES + name: image(*size) for name, size in self.cameras.items()}
        dataset = datasets.LeRobotDataset.create(toy.REPO_ID, fps=10, features=features, root=root, use_videos=False)
        random = np.random.default_rng(0)
        for episode in range(4):
            for _ in range(self.lengths[episode % len(self.lengths)]):
                frame: Frame = {"task": self.tasks[episode % len(self.tasks)]}
                for name, feature in features.items():
                    if feature["dtype"] == "image":
                        frame[name] = random.integers(0, 255, feature["shape"], dtype=np.uint8)
                    else:
                        frame[name] = random.normal(size=feature["shape"]).astype(feature["dtype"])
                self.change(frame)
                dataset.add_frame(frame)
            dataset.save_episode()
        dataset.finalize()
        return root


def hold_still(frame: Frame) -> None:
    frame[ACTION][-1], frame[STATE][0] = 0.5, 1.0


def normalised_by(mode: str) -> str:
    return f'--policy.normalization_mapping={{"VISUAL": "IDENTITY", "STATE": "{mode}", "ACTION": "{mode}"}}'


ROBOTS = {
    "40 joints": Robot(joints=40, flags=("--policy.max_state_dim=40", "--policy.max_action_dim=40")),
    "three cameras and an empty one": Robot(
        cameras={"top": (32, 32), "wrist": (48, 64), "side": (24, 40)}, flags=("--policy.empty_cameras=1",)
    ),
    "episodes of one frame": Robot(lengths=(1, 2, 8)),
    "instructions of any length": Robot(tasks=("pick", "put the red cube into the blue box and close its lid", "")),
    "float64": Robot(dtype="float64"),
    "a joint that stands still, by range": Robot(joints=3, change=hold_still, flags=(normalised_by("MIN_MAX"),)),
    "quantiles": Robot(flags=(normalised_by("QUANTILES"),)),
}


@pytest.mark.parametrize("name", ROBOTS)
@pytest.mark.sweep(share=0.15)
def test_loss_is_stock_lerobots_on_the_teachers_actions(name: str, toy_vlm: Path, tmp_path: Path) -> None:
    robot = ROBOTS[name]
    data = robot.write(tmp_path / "data")
    teacher = runs.train_teacher([*toy.policy_flags(toy_vlm), *robot.flags], data, tmp_path / "teacher")
    start = prepare.prepare_student(str(teacher), tmp_path / "start")
    log = runs.run(recipe.main, *runs.train_flags(start, data, tmp_path / "run", steps=2))
    assert all(np.isfinite(runs.logged(log, "loss")))
    trained = tmp_path / "run" / "checkpoints" / "last" / "pretrained_model"
    config = lerobot_configs.PreTrainedConfig.from_pretrained(trained)
    config.share_prefix, config.device = "off", "cpu"
    student = modeling.SmolVLAReflowPolicy.from_pretrained(trained, config=config).train()
    (batch, *_) = measure.held_out_batches(trained, toy.REPO_ID, root=data, batch_size=4, max_observations=4)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, config.chunk_size, config.max_action_dim, generator=generator)
    time = torch.rand(4, generator=generator)
    target = reflow_students.stock_target(student, batch, noise)
    stock = student.model.forward(*known_flows.observe(student, batch).arguments(), target, noise, time)
    expected = stock[..., : robot.joints].mean()  # the teacher acts in all of a chunk: nothing is padding
    torch.testing.assert_close(student(batch, noise=noise, time=time)[0], expected)
