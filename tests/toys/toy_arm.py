"""A robot of lerobot's own kind that only remembers its actions. lerobot finds it beside its configuration."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.robots.config import RobotConfig
from lerobot.robots.robot import Robot

from hf_memopt.recipes.reflow.smolvla_toy import IMAGE_SIZE

AXES = ("x.pos", "y.pos")


@RobotConfig.register_subclass("toy_arm")
@dataclass(kw_only=True)
class ToyArmConfig(RobotConfig):
    num_actions: int = 1


class ToyArm(Robot):
    """Sets `moved` after `num_actions` actions. Its camera is `top`, as the toy dataset's."""

    config_class = ToyArmConfig
    name = "toy_arm"

    def __init__(self, config: ToyArmConfig) -> None:
        super().__init__(config)
        self.num_actions = config.num_actions
        self.actions: list[dict[str, float]] = []
        self.moved = threading.Event()

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**dict.fromkeys(AXES, float), "top": (IMAGE_SIZE, IMAGE_SIZE, 3)}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(AXES, float)

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None: ...

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def disconnect(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        return {"x.pos": -0.8, "y.pos": 0.1, "top": image}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.actions.append(action)
        if len(self.actions) >= self.num_actions:
            self.moved.set()
        return action
