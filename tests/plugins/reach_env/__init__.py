"""The toy's environment as lerobot finds it: `--env.discover_packages_path=reach_env --env.type=reach`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
import numpy as np
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from tiny_environment import Reach

from hf_memopt.recipes.reflow import smolvla_toy as toy


class RenderedReach(Reach):
    """The toy's environment with pictures for the video of `lerobot-eval`."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def render(self) -> np.ndarray:
        return toy.draw_image(self._scene, self._scene.start)


gymnasium.register("gym_reach/Reach-v0", RenderedReach, max_episode_steps=5)


@EnvConfig.register_subclass("reach")
@dataclass
class ReachConfig(EnvConfig):
    task: str | None = "Reach-v0"
    fps: int = 10
    features: dict[str, PolicyFeature] = field(
        default_factory=lambda: {
            "action": PolicyFeature(FeatureType.ACTION, (2,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (2,)),
            "pixels/top": PolicyFeature(FeatureType.VISUAL, (toy.IMAGE_SIZE, toy.IMAGE_SIZE, 3)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            "action": "action",
            "agent_pos": "observation.state",
            "pixels/top": toy.CAMERA,
        }
    )

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {}
