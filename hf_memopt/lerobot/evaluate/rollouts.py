"""A policy in a gymnasium environment, by number of Euler steps, with lerobot's own rollouts."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.processor import PolicyProcessorPipeline
from lerobot.scripts.lerobot_eval import eval_policy

from hf_memopt.lerobot.files.checkpoint_files import load_processors
from hf_memopt.lerobot.files.policy_files import load_config, load_policy, resolve_checkpoint
from hf_memopt.lerobot.flow.known_flows import flow_of
from hf_memopt.ranges import COUNT

_MAX_PARALLEL = 10


@dataclass(frozen=True)
class RolloutResult:
    """Episodes with one number of Euler steps."""

    num_episodes: int
    success_rate: float  # the environment calls it one by info["is_success"]
    mean_reward: float  # of the sums over episodes


def evaluate_in_environment(
    policy: str, env_id: str, num_steps: Sequence[int], *, num_episodes: int = 10, device: str = "cpu"
) -> dict[int, RolloutResult]:
    """Run a policy in an environment, with each of `num_steps`.

    `env_id` is a registered environment, or `package:Name-v0`, which imports `package` first. Its observations are
    named as lerobot's environments name theirs: `pixels` (uint8 images, channels last, one or by camera) and
    `agent_pos`. It has a limit of steps, and attributes `task` and `task_description`. Episode n has the seed
    n, and the noise of all the seed 0. Global generators are left alone.
    """
    COUNT.check("num_episodes", num_episodes)
    environment = _make_environment(env_id, min(num_episodes, _MAX_PARALLEL))
    folder = resolve_checkpoint(policy)
    processors = load_processors(load_config(folder), folder, {"device_processor": {"device": device}})
    model = load_policy(folder).to(device)
    results = {}
    try:
        for steps in num_steps:
            setattr(model.config, flow_of(model.config).steps_field, steps)
            nothing = PolicyProcessorPipeline(steps=[])
            with torch.random.fork_rng():
                torch.manual_seed(0)
                found = eval_policy(environment, model, nothing, nothing, *processors, num_episodes, start_seed=0)
            overall = found["aggregated"]
            results[steps] = RolloutResult(num_episodes, overall["pc_success"] / 100, overall["avg_sum_reward"])
    finally:
        environment.close()
    return results


def _make_environment(env_id: str, count: int) -> SyncVectorEnv:
    package, _, name = env_id.rpartition(":")
    try:
        if package:
            importlib.import_module(package)
        spec = gymnasium.spec(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"env={env_id!r}: {error}; register it, or name its package as in package:Name-v0") from error
    if spec.max_episode_steps is None:
        raise ValueError(f"env={env_id!r} has no limit of steps; register it with max_episode_steps")
    make = freeze_after_episode_end(lambda: gymnasium.make(name))
    return SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode.NEXT_STEP)
