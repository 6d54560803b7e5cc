"""Training dies at a memory limit, and the same training runs through below it: on a CPU, within three minutes.

    python -m benchmarks.limit.demo --output outputs/demo_fit

A small language model trains three times, each time in a process of its own: without a limit, with one, and with the
same one and its saved activations on a disk. The limit is real: the system's own, for one process. Linux only.
Results: `results.json` and `memory_and_loss.png` in the output folder.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.limit.limited_process import ENVIRONMENT, Event, LimitedRun, run_limited
from benchmarks.limit.limits import KINDS, memory_limit
from hf_memopt.command_line import number, one_line_errors
from hf_memopt.ranges import COUNT
from hf_memopt.recipes.common.results import can_draw, drawn
from hf_memopt.recipes.reflow.demo_commands import demo_parser, make_room
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import GIB, MIB

TRAINING = "benchmarks.limit.train"
OUTPUTS = ("logs", "results.json", "memory_and_loss.png")
NUM_STEPS = 16
NUM_SHOWN = 4  # of them, in the picture of memory
# Shares of the memory that a step of the plain run takes.
ALLOWANCE, BUDGET = 0.4, 0.2
LOOKS = {
    "without a limit": {"color": "#aab4be", "linewidth": 3.5},
    "with the limit": {"color": "#d1495b", "linewidth": 2.4},
    "with the limit, activations on disk": {"color": "#4c78a8", "linewidth": 1.6},
}
FREE, PLAIN, OURS = LOOKS


Runs = dict[str, LimitedRun]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = demo_parser(__doc__, "outputs/demo_fit")
    add = parser.add_argument
    add("--steps", type=number(COUNT), default=NUM_STEPS, help="of each training (default: %(default)s)")
    add("--limit", choices=KINDS, default="auto", help="a control group, RLIMIT_DATA, or the first if possible")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    make_room(options.output, OUTPUTS, options.overwrite)
    runs, allowance = train_three_times(options)
    results = results_of(runs, allowance)
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print_summary(results)
    if can_draw("memory_and_loss.png"):
        draw(runs, allowance, options.output / "memory_and_loss.png")
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Results and figure: {options.output}")
    return 0


def train_three_times(options: argparse.Namespace) -> tuple[Runs, int]:
    """Return the runs, and how much memory beyond that at rest the last two were allowed."""
    free = run(options, FREE)
    step_bytes = free.peak_bytes - free.rest.anonymous_bytes
    allowance = round(ALLOWANCE * step_bytes)
    print(f"    A step takes {step_bytes / MIB:.0f} MiB. From now on it may have {allowance / MIB:.0f}.", flush=True)
    plain = run(options, PLAIN, free=free, allowance=allowance)
    with tempfile.TemporaryDirectory(dir=options.output) as disk:
        flags = [f"--disk={disk}", f"--budget-gib={BUDGET * step_bytes / GIB}"]
        ours = run(options, OURS, *flags, free=free, allowance=allowance)
    return {FREE: free, PLAIN: plain, OURS: ours}, allowance


def run(
    options: argparse.Namespace, name: str, *flags: str, free: LimitedRun | None = None, allowance: int = 0
) -> LimitedRun:
    """Train in a process of its own; with a `free` run, below that run's memory at rest and the allowance."""
    command = [sys.executable, "-m", TRAINING, f"--steps={options.steps}", f"--seed={options.seed}", *flags]
    log = options.output / "logs" / f"{name.replace(' ', '_').replace(',', '')}.log"
    with memory_limit(options.limit) as limit:
        by = "" if free is None else f" ({limit.name})"
        print(f"\n=== Training {name}{by}", flush=True)
        limit_bytes = None if free is None else free.counted_rest(limit) + allowance
        found = run_limited(command, limit, limit_bytes, log=log, environ=ENVIRONMENT, show=show)
    print(f"\n    {found.end}{f': {found.reason}' if found.reason else ''}", flush=True)
    return found


def show(event: Event) -> None:
    if event["event"] == "step":
        print(f"{event['loss']:.2f}", end=" ", flush=True)


def results_of(runs: Runs, allowance: int) -> dict[str, Any]:
    return {
        "allowance_bytes": allowance,
        "runs": {
            name: {
                "end": run.end,
                "reason": run.reason,
                "rest_bytes": run.rest.anonymous_bytes,
                "peak_bytes": run.peak_bytes,
                "losses": run.losses,
                **{key: run.results.get(key) for key in ("cpu_s", "written_bytes", "weights_digest")},
            }
            for name, run in runs.items()
        },
    }


def print_summary(results: dict[str, Any]) -> None:
    rows: list[list[Cell]] = []
    for name, run in results["runs"].items():
        over_rest = (run["peak_bytes"] - run["rest_bytes"]) / MIB
        last, cpu_s = (run["losses"][-1], run["cpu_s"]) if run["end"] == "finished" else (None, None)
        rows.append([name, run["end"], len(run["losses"]), f"{over_rest:.0f}", last, cpu_s])
    print(f"\nMemory is counted beyond that at rest; the limit is {results['allowance_bytes'] / MIB:.0f} MiB.\n")
    print(Table(["training", "end", "steps", "peak MiB", "last loss", "CPU s"], rows, digits=3))
    free, ours = (results["runs"][name] for name in (FREE, OURS))
    print(f"\nAll losses equal: {free['losses'] == ours['losses']}. ", end="")
    print(f"All weights equal, bit for bit: {free['weights_digest'] == ours['weights_digest']}.")


def draw(runs: Runs, allowance: int, file: Path) -> None:
    with drawn(file, 1, 2, 120, figsize=(11, 4)) as (memory, loss):
        for name, run in runs.items():
            start_s, rest = run.samples[0].at_s, run.rest.anonymous_bytes
            over_rest = [(each.at_s - start_s, (each.anonymous_bytes - rest) / MIB) for each in run.samples]
            top = max(over_rest, key=lambda each: each[1])
            if run.end != "finished":
                over_rest = over_rest[: over_rest.index(top) + 1]  # an error frees memory again
                color = LOOKS[name]["color"]
                memory.plot(*top, "X", color=color, markersize=12, zorder=3)
                memory.annotate(f"   {run.end}", top, color=color, weight="bold", va="top")
            memory.plot(*zip(*over_rest, strict=True), **LOOKS[name])
            loss.plot(range(1, len(run.losses) + 1), run.losses, label=name, **LOOKS[name])
        memory.axhline(allowance / MIB, color="#24292f", linewidth=1.4)
        shown = runs[OURS].steps[: NUM_SHOWN + 1][-1]["at_s"] - runs[OURS].samples[0].at_s
        memory.set(title="Memory beyond that at rest", xlabel="seconds", ylabel="MiB", ylim=(0, None), xlim=(0, shown))
        loss.set(title="Loss", xlabel="step")
        loss.legend()


if __name__ == "__main__":
    sys.exit(one_line_errors("demo_fit", main))
