"""The demo's figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from hf_memopt.recipes.reflow import smolvla_toy as toy
from hf_memopt.recipes.reflow.demo_measurements import Scene
from hf_memopt.units import MIB

COLORS = {"teacher": "tab:blue", "student": "tab:orange"}
HOLDERS = {
    "student weights": "#4c72b0",
    "optimizer state": "#8172b3",
    "gradients": "#937860",
    "saved activations": "#dd8452",
    "teacher weights": "#c44e52",
    "shared prefix": "#55a868",
}


def draw_errors(evaluation: dict[str, Any], passing: dict[str, dict[int, float]], file: Path) -> None:
    """Error against the teacher's own sampling, and success at the task, by number of Euler steps."""
    figure, (error, success) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, color in COLORS.items():
        for axes, values in ((error, evaluation[name]["error"]), (success, passing[name])):
            steps = sorted(values)
            axes.plot(range(len(steps)), [values[s] for s in steps], "o-", color=color, label=name)
            axes.set_xticks(range(len(steps)), [str(s) for s in steps])
            axes.set_xlabel("Euler steps")
    error.set_title(f"Difference to the teacher's {evaluation['teacher_num_steps']}-step actions")
    error.set_ylabel("RMSE, normalised actions")
    error.set_ylim(0, 1.1 * error.get_ylim()[1])
    success.set_title("Action chunks that pass the obstacle")
    success.set_ylabel("share of all samples")
    success.set_ylim(0, 1)
    for axes in (error, success):
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, file)


def draw_paths(scenes: Sequence[Scene], file: Path) -> None:
    """Sampled action chunks past the obstacle: one row per observation, one column per sampler."""
    titles = list(scenes[0].paths)
    size = (3.6 * len(titles), 3.2 * len(scenes))
    figure, grid = plt.subplots(len(scenes), len(titles), figsize=size, layout="constrained", squeeze=False)
    for row, scene in zip(grid, scenes, strict=True):
        for axes, (title, paths) in zip(row, scene.paths.items(), strict=True):
            _draw_scene(axes, scene)
            for path in paths:
                color = COLORS[title.split(",")[0]]
                axes.plot(path[:, 0], path[:, 1], "-", color=color, alpha=0.15, linewidth=0.7)
                axes.plot(path[:, 0], path[:, 1], ".", color=color, alpha=0.5, markersize=5)
            axes.set_title(title)
    figure.suptitle("Sampled action chunks (24 draws of noise): agent red, obstacle blue, goal green")
    _save(figure, file)


def draw_learning(curves: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """Training losses as lerobot logged them."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), color=COLORS[name], label=f"{name}: {_LOSSES[name]}")
    axes.set_xlabel("batches")
    axes.set_ylabel("loss")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _save(figure, file)


_LOSSES = {"teacher": "flow matching on the data", "student": "reflow on the teacher's couplings"}


def draw_memory(memory: dict[str, dict[str, dict[str, int]]], file: Path) -> None:
    """What is held on the device in each phase of a step, by design."""
    designs, phases = list(memory), list(next(iter(memory.values())))
    figure, row = plt.subplots(1, len(phases), figsize=(13, 4.5), layout="constrained", sharey=True)
    for axes, phase in zip(row, phases, strict=True):
        bottoms = [0.0] * len(designs)
        for holder, color in HOLDERS.items():
            heights = [memory[design][phase].get(holder, 0) / MIB for design in designs]
            axes.bar(range(len(designs)), heights, bottom=bottoms, color=color, label=holder)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_title(phase)
        axes.set_xticks(range(len(designs)), [design.replace(" ", "\n") for design in designs], fontsize=8)
    totals = [sum(holders.values()) for by_phase in memory.values() for holders in by_phase.values()]
    row[0].set_ylim(0, 1.05 * max(totals) / MIB)
    row[0].set_ylabel("MiB on the device")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(HOLDERS))
    _save(figure, file)


def _draw_scene(axes: Axes, scene: Scene) -> None:
    for center, radius, color in ((scene.obstacle, toy.OBSTACLE_RADIUS, "blue"), (scene.goal, 0.06, "green")):
        axes.add_patch(Circle((float(center[0]), float(center[1])), radius, color=color, alpha=0.3))
    axes.plot(*scene.agent, "o", color="red")
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])


def _save(figure: plt.Figure, file: Path) -> None:
    figure.savefig(file, dpi=120)
    plt.close(figure)
