"""Measurements of the demo on its trained policies, and its figures."""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from torch import Tensor

from hf_memopt.lerobot.evaluate.measure import ReflowEvaluation, evaluate_reflow, held_out_batches, sample_trajectory
from hf_memopt.lerobot.files.policy_files import load_config, load_policy, resolve_checkpoint
from hf_memopt.lerobot.flow.known_flows import flow_of, observe
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.lerobot.student.model_card import Observations
from hf_memopt.memory import SavedBytes
from hf_memopt.recipes.common.results import drawn
from hf_memopt.recipes.reflow import smolvla_toy as toy
from hf_memopt.report.html_page import KIND_COLORS
from hf_memopt.units import MIB

NUM_SCENES = 3
NUM_DRAWS = 24
# The frame before the paths part, where nothing seen yet tells which side it will be.
DECISIVE_FRAME = 0

Rates = dict[str, dict[int, float]]  # by policy and Euler steps


class SampledPaths(NamedTuple):
    scene: toy.Scene
    agent: toy.FloatArray  # `(2,)`
    paths: dict[str, Tensor]  # by sampler, `(draws, chunk, 2)` in the dataset's units


class Demo:
    """The trained policies of one demo and observations that none of them was trained on."""

    def __init__(self, folder: Path, held_out: Sequence[int], seed: int, student_name: str = "student") -> None:
        self.student_folder, self._dataset = resolve_checkpoint(folder / student_name), folder / "toy" / "dataset"
        self.teacher: SmolVLAPolicy = load_policy(resolve_checkpoint(folder / "teacher"))
        self.student: SmolVLAPolicy = load_policy(self.student_folder)
        self.observations = Observations(toy.REPO_ID, self._dataset, list(held_out), held_out=True)
        num_frames = toy.PATH_STEPS * len(held_out)
        self.batches: list[dict[str, Tensor]] = held_out_batches(
            self.student_folder, toy.REPO_ID, self._dataset, held_out, max_observations=num_frames
        )
        self.demonstrations = list(islice(toy.demonstrations(held_out[-1] + 1, seed), held_out[0], None))
        keys = [key for key, value in self.batches[0].items() if isinstance(value, Tensor)]
        together = {key: torch.cat([batch[key] for batch in self.batches]) for key in keys}
        # One observation per demonstration.
        self.decisive = {key: value[DECISIVE_FRAME :: toy.PATH_STEPS] for key, value in together.items()}

    def evaluation(self) -> ReflowEvaluation:
        return evaluate_reflow(self.student, self.teacher, self.batches)

    def memory(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return bytes by design, phase and holder, in one training step of the first batch.

        The target comes before the student's forward in every design, since the student trains on it; so a teacher
        that is moved whole holds the same bytes whether it is copied back or dropped.
        """
        joint, shared = self.step_bytes("off"), self.step_bytes("on")
        teacher = {"teacher weights": joint["teacher weights"]}
        own_teacher = {key: shared[key] for key in ("teacher weights", "shared prefix")}
        return {
            "teacher resident": self.phases(teacher, joint["saved activations"], resident=teacher),
            "teacher swapped in": self.phases(teacher, joint["saved activations"], resident={}),
            "swap + shared prefix": self.phases(own_teacher, shared["saved activations"], resident={}),
        }

    def sampled_paths(self) -> list[SampledPaths]:
        samplers = {
            "teacher, 10 steps": (self.teacher, 10),
            "teacher, 1 step": (self.teacher, 1),
            "student, 1 step": (self.student, 1),
        }
        found = []
        for index, each in enumerate(self.demonstrations[:NUM_SCENES]):
            chosen = slice(index, index + 1)
            paths = {title: self._paths(policy, chosen, steps) for title, (policy, steps) in samplers.items()}
            found.append(SampledPaths(each.scene, each.positions[DECISIVE_FRAME], paths))
        return found

    def rates(self) -> dict[str, Rates]:
        """Return the shares of action chunks that pass without touching the obstacle, and that zigzag."""
        questions = {"passing_rates": passes_obstacle, "zigzag_rates": zigzags}
        policies = {"teacher": self.teacher, "student": self.student}
        rates: dict[str, Rates] = {title: {name: {} for name in policies} for title in questions}
        for name, policy in policies.items():
            for steps in (1, 2, 4, 10):
                paths = self._paths(policy, slice(None), steps).unflatten(0, (-1, NUM_DRAWS))
                for title, question in questions.items():
                    answers = [question(*each) for each in zip(paths, self.demonstrations, strict=True)]
                    rates[title][name][steps] = torch.stack(answers).float().mean().item()
        return rates

    def step_bytes(self, share_prefix: str) -> dict[str, int]:
        config = load_config(self.student_folder)
        config.share_prefix = share_prefix
        student = SmolVLAReflowPolicy.from_pretrained(self.student_folder, config=config).train()
        with SavedBytes(student.parameters()) as saved:
            student(self.batches[0])
        report = student.teacher.report()  # None where the student teaches itself
        prefix = flow_of(student.config).prefix(student.model, observe(student, self.batches[0]))
        return {
            "teacher weights": report.own_bytes if report else 0,
            "saved activations": saved.total_bytes,
            "shared prefix": prefix.num_bytes,
        }

    def phases(self, teacher: dict[str, int], saved: int, resident: dict[str, int]) -> dict[str, dict[str, int]]:
        trained = sum(parameter.nbytes for parameter in self.student.parameters() if parameter.requires_grad)
        weights = sum(tensor.nbytes for tensor in (*self.student.parameters(), *self.student.buffers()))
        fixed = {"student weights": weights, "optimizer state": 2 * trained}
        step = {**fixed, **resident, "gradients": trained}
        return {
            "teacher": {**fixed, **teacher},
            "forward+backward": {**step, "saved activations": saved},
            "optimizer": step,
            "between steps": {**fixed, **resident},
        }

    def _paths(self, policy: SmolVLAPolicy, chosen: slice, num_steps: int) -> Tensor:
        """Sample `(observations * draws, chunk, 2)` in the dataset's units, the draws of an observation in a row."""
        batch = {key: value[chosen].repeat_interleave(NUM_DRAWS, dim=0) for key, value in self.decisive.items()}
        shape = (len(batch["action"]), policy.config.chunk_size, policy.config.max_action_dim)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        actions = sample_trajectory(policy, observe(policy, batch), noise, num_steps)[-1, ..., :2]
        stats = LeRobotDatasetMetadata(toy.REPO_ID, root=self._dataset).stats["action"]
        return actions * torch.as_tensor(stats["std"]).float() + torch.as_tensor(stats["mean"]).float()


def passes_obstacle(paths: Tensor, demonstration: toy.Demonstration) -> Tensor:
    """Say which of `paths`, `(draws, chunk, 2)` from the decisive frame on, stay clear of the obstacle, `(draws,)`."""
    start = torch.from_numpy(demonstration.positions[DECISIVE_FRAME]).expand(len(paths), 1, 2)
    points = torch.cat([start, paths], dim=1)
    along = torch.linspace(0, 1, 10)[:, None]
    between = points[:, :-1, None] * (1 - along) + points[:, 1:, None] * along
    distances = (between - torch.from_numpy(demonstration.scene.obstacle)).norm(dim=-1)
    return distances.flatten(1).amin(dim=1) > toy.OBSTACLE_RADIUS


def zigzags(paths: Tensor, demonstration: toy.Demonstration) -> Tensor:
    """Say which of `paths` have points on both sides of the way through the obstacle, each farther than its radius."""
    scene = demonstration.scene
    aside = (paths - torch.from_numpy(scene.start)) @ torch.from_numpy(scene.left)
    return (aside.amax(dim=1) > toy.OBSTACLE_RADIUS) & (aside.amin(dim=1) < -toy.OBSTACLE_RADIUS)


def learning_curve(log: str, log_freq: int) -> list[tuple[int, float]]:
    """Read (step, mean loss since the last) from the lines that lerobot logs every `log_freq` steps."""
    losses = re.findall(r"step:\S+ .*? loss:([\d.]+)", log)
    return [((index + 1) * log_freq, float(loss)) for index, loss in enumerate(losses)]


COLORS = {"teacher": KIND_COLORS["teacher"], "student": KIND_COLORS["parameters"]}
HOLDERS = ("student weights", "optimizer state", "gradients", "saved activations", "teacher weights", "shared prefix")
LOSSES = {"teacher": "flow matching on the data", "student": "reflow on the teacher's couplings"}
DPI = 120


def draw_errors(evaluation: dict[str, Any], passing: dict[str, dict[int, float]], file: Path) -> None:
    with drawn(file, 1, 2, DPI, figsize=(10, 4)) as (error, success):
        for name, color in COLORS.items():
            for axes, values in ((error, evaluation[name]["error"]), (success, passing[name])):
                steps = sorted(values)
                axes.plot(range(len(steps)), [values[s] for s in steps], "o-", color=color, label=name)
                axes.set_xticks(range(len(steps)), [str(s) for s in steps])
        title = f"Difference to the teacher's {evaluation['teacher_num_steps']}-step actions"
        error.set(title=title, ylabel="RMSE, normalised actions", ylim=(0, 1.1 * error.get_ylim()[1]))
        success.set(title="Action chunks that pass the obstacle", ylabel="share of all samples", ylim=(0, 1))
        for axes in (error, success):
            axes.set_xlabel("Euler steps")
            axes.grid(alpha=0.3)
            axes.legend()


def draw_paths(sampled: Sequence[SampledPaths], file: Path) -> None:
    titles = list(sampled[0].paths)
    size = (3.6 * len(titles), 3.2 * len(sampled))
    with drawn(file, len(sampled), len(titles), DPI, figsize=size, squeeze=False) as grid:
        for row, (scene, agent, all_paths) in zip(grid, sampled, strict=True):
            for axes, (title, paths) in zip(row, all_paths.items(), strict=True):
                _draw_scene(axes, scene, agent)
                for path in np.concatenate([np.tile(agent, (len(paths), 1, 1)), paths], axis=1):
                    color = COLORS[title.split(",")[0]]
                    axes.plot(path[:, 0], path[:, 1], "-", color=color, alpha=0.3, linewidth=0.7)
                    axes.plot(path[:, 0], path[:, 1], ".", color=color, alpha=0.5, markersize=5)
                axes.set_title(title)
        axes.figure.suptitle("Sampled action chunks (24 draws of noise): agent red, obstacle blue, goal green")


def draw_learning(curves: dict[str, list[tuple[int, float]]], file: Path) -> None:
    with drawn(file, 1, 1, DPI, figsize=(6, 4)) as axes:
        for name, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), color=COLORS[name], label=f"{name}: {LOSSES[name]}")
        axes.set(xlabel="training steps", ylabel="loss", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()


def draw_memory(memory: dict[str, dict[str, dict[str, int]]], file: Path) -> None:
    designs, phases = list(memory), list(next(iter(memory.values())))
    totals = [sum(holders.values()) for by_phase in memory.values() for holders in by_phase.values()]
    with drawn(file, 1, len(phases), DPI, figsize=(13, 4.5), sharey=True) as row:
        for axes, phase in zip(row, phases, strict=True):
            bottoms = [0.0] * len(designs)
            for holder in HOLDERS:
                heights = [memory[design][phase].get(holder, 0) / MIB for design in designs]
                axes.bar(range(len(designs)), heights, bottom=bottoms, color=KIND_COLORS[holder], label=holder)
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            axes.set_title(phase)
            axes.set_xticks(range(len(designs)), [design.replace(" ", "\n") for design in designs], fontsize=8)
        row[0].set(ylim=(0, 1.05 * max(totals) / MIB), ylabel="MiB on the device")
        handles, labels = row[0].get_legend_handles_labels()
        row[0].figure.legend(handles, labels, loc="outside lower center", ncols=len(HOLDERS))


def _draw_scene(axes: Axes, scene: toy.Scene, agent: toy.FloatArray) -> None:
    for center, radius, color in ((scene.obstacle, toy.OBSTACLE_RADIUS, "blue"), (scene.goal, 0.06, "green")):
        axes.add_patch(Circle(tuple(center), radius, color=color, alpha=0.3))
    axes.plot(*agent, "o", color="red")
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
