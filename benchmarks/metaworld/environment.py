"""lerobot's Meta-World with a camera that numpy draws from the state: no OpenGL, and a tenth of a millisecond a frame.

The simulator, its tasks and the criterion of success are Meta-World's; seeds, episodes and observations are lerobot's.
Only the picture is made here: hand, object and goal as soft discs, seen from above and from the front.

    lerobot-eval --env.discover_packages_path=benchmarks.metaworld --env.type=metaworld_drawn \\
        --env.task=reach-v3 …
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.metaworld import TASK_DESCRIPTIONS, MetaworldEnv
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.utils.constants import ACTION, OBS_IMAGE, OBS_STATE
from numpy.typing import ArrayLike, NDArray

IMAGE_SIZE = 32
# The experts need less than 100; Meta-World itself stops after 500.
MAX_STEPS = 200

# Metres: to the side, away from the robot's base, and up.
_LOW, _HIGH = np.array([-0.35, 0.4, 0.0]), np.array([0.35, 1.0, 0.45])
_RADIUS = 2.0  # of a disc, in pixels


class DrawnMetaworldEnv(MetaworldEnv):
    """One task, with observations `pixels` `(32, 32, 3)` uint8 and `agent_pos` `(4,)`: hand and gripper."""

    def __init__(self, task: str) -> None:
        super().__init__(task, obs_type="pixels_agent_pos", observation_width=IMAGE_SIZE, observation_height=IMAGE_SIZE)
        self._max_episode_steps = MAX_STEPS
        self.last_state: NDArray[np.float64] = np.zeros(39)  # the observation of Meta-World's experts

    def render(self) -> NDArray[np.uint8]:
        """Return the drawn picture, enlarged for videos, `(256, 256, 3)`."""
        return self._drawn(self.last_state).repeat(8, axis=0).repeat(8, axis=1)

    def _format_raw_obs(self, raw_obs: NDArray[np.float64]) -> dict[str, Any]:
        self.last_state = raw_obs
        return {"pixels": self._drawn(raw_obs), "agent_pos": raw_obs[:4].copy()}

    def _drawn(self, state: NDArray[np.float64]) -> NDArray[np.uint8]:
        return draw_image(hand=state[:3], goal=self._env._target_pos, thing=state[4:7])


def draw_image(*, hand: ArrayLike, goal: ArrayLike, thing: ArrayLike) -> NDArray[np.uint8]:
    """Draw positions in metres as red, green and blue: the upper half from above, the lower half from the front."""
    half = IMAGE_SIZE // 2
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3))
    columns, rows = np.arange(IMAGE_SIZE), np.arange(half)[:, None]
    for channel, position in enumerate((hand, goal, thing)):
        x, y, z = np.clip((np.asarray(position) - _LOW) / (_HIGH - _LOW), 0, 1)
        for view, height in ((image[:half], y), (image[half:], z)):
            squared = (columns - x * (IMAGE_SIZE - 1)) ** 2 + (rows - (1 - height) * (half - 1)) ** 2
            view[..., channel] = np.exp(-squared / (2 * _RADIUS**2))
    return (255 * image).round().astype(np.uint8)


def check_task(name: str) -> None:
    if name not in TASK_DESCRIPTIONS:
        similar = get_close_matches(name, TASK_DESCRIPTIONS, n=3, cutoff=0)
        raise ValueError(f"tasks={name!r} is none of Meta-World's; similar names: {', '.join(similar)}")


@EnvConfig.register_subclass("metaworld_drawn")
@dataclass
class DrawnMetaworldConfig(EnvConfig):
    """The environment of `lerobot-eval --env.type=metaworld_drawn`; `task` may name several, with commas."""

    task: str = "reach-v3"
    fps: int = 80
    features: dict[str, PolicyFeature] = field(
        default_factory=lambda: {
            "action": PolicyFeature(FeatureType.ACTION, (4,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (4,)),
            "pixels": PolicyFeature(FeatureType.VISUAL, (IMAGE_SIZE, IMAGE_SIZE, 3)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {"action": ACTION, "agent_pos": OBS_STATE, "pixels": OBS_IMAGE}
    )

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"task": self.task}

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, SyncVectorEnv]]:
        """Make `n_envs` copies of each task that run in turn: a step is shorter than handing it to another process."""
        return {task: {0: _vector(task, n_envs)} for task in self.task.split(",")}


def _vector(task: str, n_envs: int) -> SyncVectorEnv:
    make = freeze_after_episode_end(lambda: DrawnMetaworldEnv(task))
    return SyncVectorEnv([make] * n_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
