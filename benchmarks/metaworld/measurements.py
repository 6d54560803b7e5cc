"""Measurements of the demo in Meta-World on its policies: success rates with confidence intervals, and their table."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.metaworld import REPO_ID
from hf_memopt.text_table import Cell, Table

NUM_OBSERVATIONS = 128  # of the demonstrations, for differences between policies and for times
STUDENTS = {"student": "student", "second": "second round"}
Z_95 = 1.959964


@dataclass(frozen=True)
class TestedPolicy:
    title: str
    folder: str
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.folder.removesuffix('_1step')}_{self.num_steps}"

    @property
    def title_with_steps(self) -> str:
        return f"{self.title}, {self.num_steps} step{'s' * (self.num_steps > 1)}"


POLICIES = (
    *(TestedPolicy("teacher", "teacher", steps) for steps in (10, 4, 2, 1)),
    *(TestedPolicy(title, f"{name}_1step", 1) for name, title in STUDENTS.items()),
)


class SuccessRate(NamedTuple):
    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    def interval(self) -> tuple[float, float]:
        """Return Wilson's 95 % confidence interval, which holds for rates near 0 and 1 too."""
        n, z = self.episodes, Z_95
        middle = self.rate + z**2 / (2 * n)
        spread = z * sqrt(self.rate * (1 - self.rate) / n + z**2 / (4 * n**2))
        return max(0.0, (middle - spread) / (1 + z**2 / n)), min(1.0, (middle + spread) / (1 + z**2 / n))

    def in_words(self) -> str:
        low, high = self.interval()
        return f"{self.rate:.0%} ({low:.0%} to {high:.0%})"


def read_successes(folder: Path) -> dict[str, SuccessRate]:
    """Return the success rate of each task in the output folder of a `lerobot-eval`, and of `all` together."""
    found = {}
    for task in json.loads((folder / "eval_info.json").read_text())["per_task"]:
        successes = task["metrics"]["successes"]
        found[task["task_group"]] = SuccessRate(sum(successes), len(successes))
    return with_all(found)


def with_all(rates: dict[str, SuccessRate]) -> dict[str, SuccessRate]:
    return {**rates, "all": SuccessRate(*(sum(column) for column in zip(*rates.values(), strict=True)))}


def measured(output: Path, tasks: Sequence[str], episodes: int, first_seed: int) -> dict[str, Any]:
    """Return `policies` by name: success, ms for one chunk, difference to the teacher; and `mean_action`: its success.

    `first_seed` is the evaluation's, so that the mean action meets the same scenes.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from benchmarks.metaworld.demonstrations import successes_of_mean_action
    from hf_memopt.lerobot.evaluate.measure import evaluate_reflow, held_out_batches
    from hf_memopt.lerobot.files.policy_files import load_policy, resolve_checkpoint

    torch.set_num_threads(1)
    teacher = load_policy(resolve_checkpoint(output / "teacher"))
    batches = held_out_batches(output / "student", REPO_ID, output / "dataset", max_observations=NUM_OBSERVATIONS)
    compared = {
        f"{name}_1step": evaluate_reflow(load_policy(output / f"{name}_1step"), teacher, batches) for name in STUDENTS
    }
    sides = {"teacher": compared["student_1step"].teacher, **{name: found.student for name, found in compared.items()}}
    policies = {}
    for policy in POLICIES:
        side = sides[policy.folder]
        policies[policy.name] = {
            "title": policy.title_with_steps,
            "num_steps": policy.num_steps,
            "success": _with_intervals(read_successes(output / "evaluation" / policy.name)),
            "latency_ms": side.latency_ms[policy.num_steps],
            "error": side.error[policy.num_steps],
            "straightness": side.normalized_straightness,
        }
    dataset = LeRobotDataset(REPO_ID, root=output / "dataset")
    blind = {
        task: SuccessRate(successes_of_mean_action(dataset, task, episodes, first_seed), episodes) for task in tasks
    }
    return {"policies": policies, "mean_action": _with_intervals(with_all(blind))}


def _with_intervals(rates: dict[str, SuccessRate]) -> dict[str, dict[str, Any]]:
    return {task: {**rate._asdict(), "interval": rate.interval()} for task, rate in rates.items()}


def table(results: dict[str, Any]) -> str:
    tasks = list(results["mean_action"])
    rows: list[list[Cell]] = [
        [found["title"], *_in_words(found["success"], tasks), f"{found['latency_ms']:.1f}", f"{found['error']:.3f}"]
        for found in results["policies"].values()
    ]
    rows.append(["mean action, repeated", *_in_words(results["mean_action"], tasks), "", ""])
    return str(Table(["", *tasks, "ms per chunk", "error"], rows, digits=3))


def _in_words(success: dict[str, dict[str, Any]], tasks: Sequence[str]) -> list[str]:
    return [SuccessRate(success[task]["successes"], success[task]["episodes"]).in_words() for task in tasks]
