"""The picture of anonymous memory over the first steps under a limit, from a benchmark's results.

    python -m benchmarks.limit.picture benchmarks/results/FILE.json

The results are those of `under_a_limit`, `trained_weights` or `demo`. Needs matplotlib.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.common import MIB
from benchmarks.limit.kinds import NO_LIMIT
from benchmarks.limit.workloads import WORKLOADS

FIGURES = Path(__file__).parents[2] / "docs" / "images"
# Large for the figure, whose page is as narrow as a phone.
FONT_SIZE = 14
# Dark enough for a white page, on a white background of the picture's own.
LOOKS: dict[str, dict[str, Any]] = {
    NO_LIMIT: {"color": "#9aa5b1", "linewidth": 1.2, "linestyle": "--"},
    "plain": {"color": "#d1495b", "linewidth": 2.2},
    "ours, budget": {"color": "#e58b3d", "linewidth": 1.8},
    "ours, all": {"color": "#4c78a8", "linewidth": 1.8},
}
_WHITE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
LABELS = {
    NO_LIMIT: "plain, with the limit lifted",
    "plain": "plain",
    "ours, budget": "hf_memopt, within a budget",
    "ours, all": "hf_memopt, all on the disk",
}


# Rows of `trained_weights`, by kind and whether they are limited.
TRAINED = {("plain", False): NO_LIMIT, ("plain", True): "plain", ("ours, all", True): "ours, all"}


def draw(found: dict[str, Any], num_steps: int, path: Path) -> Path:
    """Draw the curves of one workload of `under_a_limit`, each kind's first run, in the first `num_steps` steps."""
    runs = {row["kind"]: row["runs"][0] for row in found["rows"] if "curve" in row["runs"][0]}
    limit_bytes = found["rest_bytes"] + found["allowance_bytes"]
    at_rest = "at rest: weights, gradients,\noptimizer states, libraries"
    return _draw(runs, limit_bytes, found["rest_bytes"], at_rest, num_steps, path)


def draw_trained(results: dict[str, Any], path: Path) -> Path:
    """Draw the curves of `trained_weights`, which start before the weights are loaded."""
    rows = {TRAINED.get((row["kind"], row["is_limited"])): row["runs"][0] for row in results["rows"]}
    runs = {name: rows[name] for name in LABELS if name in rows}
    rest_bytes = runs[NO_LIMIT]["rest_bytes"]
    return _draw(runs, results["limit_bytes"], rest_bytes, "libraries", results["num_steps"], path)


@rc_context({"font.size": FONT_SIZE})
def _draw(runs: dict[str, Any], limit_bytes: int, rest_bytes: int, at_rest: str, num_steps: int, path: Path) -> Path:
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    limit_mib, rest_mib = limit_bytes / MIB, rest_bytes / MIB
    for name, run in runs.items():
        points = [point for point in run["curve"] if point[0] <= num_steps]
        if run["end"] != "finished":
            points = points[: points.index(_top(points)) + 1]  # an error frees memory again
        axes.plot(*zip(*points, strict=True), label=LABELS[name], **LOOKS[name])
    axes.axhline(limit_mib, color="#24292f", linewidth=1.4)
    beside = axes.get_yaxis_transform()
    look = {"va": "bottom", "ha": "right", "weight": "bold", "xycoords": beside, "textcoords": "offset points"}
    axes.annotate(f"the limit: {limit_mib:,.0f} MiB", (0.985, limit_mib), xytext=(0, 4), bbox=_WHITE, **look)
    if "plain" in runs:
        killed_at, killed_mib = _top(runs["plain"]["curve"])
        axes.plot([killed_at], [killed_mib], "X", color=LOOKS["plain"]["color"], markersize=13, zorder=3, clip_on=False)
        ended = f"{runs['plain']['end']} in step {len(runs['plain']['losses']) + 1}"
        look = {"color": LOOKS["plain"]["color"], "weight": "bold", "bbox": _WHITE}
        is_low = limit_mib < max(_top(run["curve"])[1] for run in runs.values()) / 2
        offset = (16, 10 if is_low else -24)
        axes.annotate(ended, (killed_at, killed_mib), xytext=offset, textcoords="offset points", **look)
    axes.axhspan(0, rest_mib, color="#eceff2", zorder=0)
    axes.text(0.5, rest_mib / 2, at_rest, ha="center", va="center", color="#57606a", transform=beside)
    axes.set(
        xlabel="steps",
        ylabel="MiB of anonymous memory",
        xlim=(0, num_steps),
        ylim=(0, None),
        xticks=range(num_steps + 1),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


def draw_fit(results: dict[str, Any], path: Path) -> Path:
    """Draw memory over time, losses, and the time that they took, of the runs of `demo`: free, plain, fit."""
    with rc_context({"font.size": 11}):
        figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
        memory, losses = figure.subplots(1, 2)
        seconds = losses.twinx()
        labels = "python train.py, without the limit", "python train.py", "hf-memopt fit -- train.py"
        looks = LOOKS[NO_LIMIT] | {"linestyle": "-", "linewidth": 4.0}, LOOKS["plain"], LOOKS["ours, all"]
        for run, label, look in zip(results["runs"].values(), labels, looks, strict=True):
            memory.plot(*zip(*run["curve"], strict=True), label=label, **look)
            steps = range(1, len(run["losses"]) + 1)
            if run["end"] == "finished":
                losses.plot(steps, run["losses"], **look)
                seconds.plot(steps, run["seconds"], **look | {"linestyle": ":", "linewidth": 2})
            else:
                at_s, mib = _top(run["curve"])
                memory.plot([at_s], [mib], "X", color=look["color"], markersize=13, zorder=3)
                away = {"xytext": (12, 8), "textcoords": "offset points"}
                memory.annotate(run["end"], (at_s, mib), color=look["color"], weight="bold", bbox=_WHITE, **away)
        limit_mib = results["limit_bytes"] / MIB
        memory.axhline(limit_mib, color="#24292f", linewidth=1.4)
        memory.annotate(
            f"the limit: {limit_mib:,.0f} MiB",
            (0.99, limit_mib),
            xytext=(0, 4),
            weight="bold",
            ha="right",
            xycoords=memory.get_yaxis_transform(),
            textcoords="offset points",
            bbox=_WHITE,
        )
        memory.set(xlabel="seconds", ylabel="MiB of anonymous memory", ylim=(0, None), xlim=(0, None))
        losses.set(xlabel="step", ylabel="loss (solid)", ylim=(0, None))
        seconds.set(ylabel="seconds since the start (dotted)", ylim=(0, None))
        for axes in (memory, losses, seconds):
            axes.spines["top"].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=144)
    return path


def _top(points: list[list[float]]) -> list[float]:
    return max(points, key=lambda point: point[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file of one of these benchmarks")
    parser.add_argument("--workload", choices=WORKLOADS, default="language model", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of a workload that are shown (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help=f"PNG file (default: one of {FIGURES})")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    if results.get("benchmark") == "limit.demo":
        print("drew", draw_fit(results, options.figure or FIGURES / "fit.png"))
    elif "workloads" in results:
        path = options.figure or FIGURES / "under_a_limit.png"
        print("drew", draw(results["workloads"][options.workload], options.steps, path))
    else:
        print("drew", draw_trained(results, options.figure or FIGURES / "full_fine_tuning.png"))


if __name__ == "__main__":
    main()
