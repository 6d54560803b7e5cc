"""Training dies at a memory limit, and the same script runs through below it with `hf-memopt fit` in front.

    python -m benchmarks.limit.demo --output outputs/demo_fit

`benchmarks/limit/train.py`, a plain loop on Accelerate, runs three times: without a limit, with one, and with
the same one as `hf-memopt fit -- train.py`. The limit is real: the system's own. Linux only, on a CPU, within three
minutes. Results: `results.json` and `memory_and_loss.png` in the output folder.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import CPU, environment, highest_points
from benchmarks.limit import picture
from benchmarks.limit.limited_process import Sample
from benchmarks.limit.limits import KINDS, ControlGroup, memory_limit
from benchmarks.limit.watched import COMMAND_BYTES, Line, WatchedRun, limit_in_force, watch
from hf_memopt.command_line import number, one_line_errors
from hf_memopt.ranges import COUNT
from hf_memopt.recipes.common.results import can_draw
from hf_memopt.recipes.reflow.demo_commands import demo_parser, make_room
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import MIB

OUTPUTS = ("logs", "results.json", "memory_and_loss.png")
NUM_STEPS = 10
# Share of the memory that training adds to that of a process with its libraries imported.
ALLOWANCE = 0.4
# RLIMIT_DATA also counts the memory that threads reserve.
THREADS_BYTES = 160 * MIB
POINTS_PER_SECOND = 10
FREE, PLAIN, FIT = "without a limit", "with the limit", "with the limit, hf-memopt fit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = demo_parser(__doc__, "outputs/demo_fit")
    add = parser.add_argument
    add("--steps", type=number(COUNT), default=NUM_STEPS, help="of each training (default: %(default)s)")
    add("--limit", choices=KINDS, default="auto", help="a control group, RLIMIT_DATA, or the first if possible")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    make_room(options.output, OUTPUTS, options.overwrite)
    results = train_three_times(options)
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print_summary(results)
    if can_draw("memory_and_loss.png"):
        picture.draw_fit(results, options.output / "memory_and_loss.png")
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Results and figure: {options.output}")
    return 0


def train_three_times(options: argparse.Namespace) -> dict[str, Any]:
    script = ["-m", "benchmarks.limit.train", f"--steps={options.steps}", f"--seed={options.seed}"]
    free = run(options, FREE, script)
    rest_bytes = free.printed("rest_bytes")[0]
    added_bytes = free.peak_bytes - rest_bytes
    limit_bytes = round(rest_bytes + ALLOWANCE * added_bytes)
    print(f"    Training adds {added_bytes / MIB:.0f} MiB. From now on it may add {ALLOWANCE * added_bytes / MIB:.0f}.")
    plain = run(options, PLAIN, script, limit_bytes)
    with tempfile.TemporaryDirectory(dir=options.output) as disk:
        flags = ["--memory", f"{limit_bytes // MIB}MiB", "--disk", disk]
        fit = run(options, FIT, ["-m", "hf_memopt.cli", "fit", *flags, "--", *script], limit_bytes)
    runs = {FREE: free, PLAIN: plain, FIT: fit}
    return {
        **environment(CPU),
        "benchmark": "limit.demo",
        "rest_bytes": rest_bytes,
        "limit_bytes": limit_bytes,
        "num_steps": options.steps,
        "runs": {name: facts_of(each) for name, each in runs.items()},
    }


def run(options: argparse.Namespace, name: str, words: Sequence[str], limit_bytes: int | None = None) -> WatchedRun:
    """Run Python with some words, below the enforced limit if there is one."""
    log = options.output / "logs" / f"{name.replace(' ', '_').replace(',', '')}.log"
    shown = " ".join(words).replace("-m hf_memopt.cli", "hf-memopt").replace("-m benchmarks.limit.train", "train.py")
    with memory_limit(options.limit) as limit:
        by = "" if limit_bytes is None else f" ({limit.name})"
        print(f"\n=== Training {name}{by}: {shown}", flush=True)
        if limit_bytes is not None:
            limit_bytes = limit_in_force(limit_bytes) + COMMAND_BYTES if name == FIT else limit_bytes
            limit_bytes += 0 if isinstance(limit, ControlGroup) else THREADS_BYTES
        found = watch([sys.executable, *words], log, limit, limit_bytes, show=show)
    print(f"\n    {found.end}", flush=True)
    for line in found.text.splitlines():
        if line.startswith(("fit: ", "part ", "activations ", "weights ", "state ")):
            print(f"    {line}")
    return found


def show(line: Line) -> None:
    if "loss" in line:
        print(f"{line['loss']:.2f}", end=" ", flush=True)


def facts_of(run: WatchedRun) -> dict[str, Any]:
    begun_s = run.samples[0].at_s
    starts = [number for number, line in enumerate(run.lines) if "rest_bytes" in line]
    steps = [line for line in run.lines[starts[-1] :] if "loss" in line]  # `fit` may start a script once more
    return {
        "end": run.end,
        "num_starts": len(starts),
        "peak_bytes": run.peak_bytes,
        "losses": [line["loss"] for line in steps],
        "seconds": [round(line["at_s"] - begun_s, 2) for line in steps],
        "cpu_s": next(iter(run.printed("cpu_s")), None),
        "weights_digest": next(iter(run.printed("digest")), None),
        "curve": curve(run.samples, begun_s),
    }


def curve(samples: Sequence[Sample], begun_s: float) -> list[list[float]]:
    """Return the highest of the samples in each stretch of time, as seconds and MiB."""
    points = ((each.at_s - begun_s, each.anonymous_bytes / MIB) for each in samples)
    return [[round(at_s, 2), round(mib, 1)] for at_s, mib in highest_points(points, POINTS_PER_SECOND)]


def print_summary(results: dict[str, Any]) -> None:
    rows: list[list[Cell]] = []
    for name, run in results["runs"].items():
        over_rest = (run["peak_bytes"] - results["rest_bytes"]) / MIB
        last = run["losses"][-1] if run["end"] == "finished" else None
        rows.append([name, run["end"], len(run["losses"]), f"{over_rest:.0f}", last, run["cpu_s"]])
    allowed = (results["limit_bytes"] - results["rest_bytes"]) / MIB
    print(f"\nMemory is counted beyond that of a process with its libraries imported; {allowed:.0f} MiB are allowed.\n")
    print(Table(["training", "end", "steps", "peak MiB", "last loss", "CPU s"], rows, digits=3))
    free, fit = (results["runs"][name] for name in (FREE, FIT))
    print(f"\nAll losses equal: {free['losses'] == fit['losses']}. ", end="")
    print(f"All weights equal, bit for bit: {free['weights_digest'] == fit['weights_digest']}.")


if __name__ == "__main__":
    sys.exit(one_line_errors("demo_fit", main))
