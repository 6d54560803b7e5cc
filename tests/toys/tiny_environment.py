"""A gymnasium environment as lerobot's are: three steps to the goal, and success if the hand went right."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from hf_memopt.recipes.reflow import smolvla_toy as toy


class Reach(gymnasium.Env):
    """A scene whose reward counts steps; success is a mean action right of `threshold`."""

    metadata: ClassVar = {"render_modes": [], "render_fps": 10}
    task = "reach"
    task_description = toy.TASK

    def __init__(self, threshold: float = -1e9) -> None:
        box = gymnasium.spaces.Box
        image = box(0, 255, (toy.IMAGE_SIZE, toy.IMAGE_SIZE, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            {"pixels": gymnasium.spaces.Dict({"top": image}), "agent_pos": box(-9, 9, (2,), np.float32)}
        )
        self.action_space = box(-9, 9, (2,), np.float32)
        self._threshold = threshold

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._scene = next(toy.demonstrations(1, int(self.np_random.integers(1000)))).scene
        self._actions: list[float] = []
        return self._observe(self._scene.start), {}

    def step(self, action: np.ndarray) -> Any:
        self._actions.append(float(action[0]))
        done = len(self._actions) == 3
        success = done and float(np.mean(self._actions)) > self._threshold
        return self._observe(action.astype(np.float32)), 1.0, done, False, {"is_success": success}

    def _observe(self, agent: np.ndarray) -> dict[str, Any]:
        return {"pixels": {"top": toy.draw_image(self._scene, agent)}, "agent_pos": agent.clip(-9, 9)}


gymnasium.register("Reach-v0", Reach, max_episode_steps=5)
gymnasium.register("ReachTheImpossible-v0", Reach, max_episode_steps=5, kwargs={"threshold": 1e9})
gymnasium.register("ReachForever-v0", Reach)
