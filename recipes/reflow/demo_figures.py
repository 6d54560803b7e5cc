"""The demo's figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from hf_memopt.recipes.common.results import drawn
from hf_memopt.recipes.reflow import smolvla_toy as toy
from hf_memopt.recipes.reflow.demo_measurements import SampledPaths
from hf_memopt.report.html_page import KIND_COLORS
from hf_memopt.units import MIB

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
