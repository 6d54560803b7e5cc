"""One-step error of teacher and reflow student, on held-out episodes, over several seeds.

    python -m benchmarks.teacher.reflow_quality
    python -m benchmarks.teacher.reflow_quality --variants ushaped huber demonstrations seeded self round2

The demo (`make demo`) runs once per seed, some minutes each. A variant trains another student from the same start with
other flags, two minutes more, and is compared with the same teacher. No accelerator is needed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkParser, current_device, environment, finish, print_table
from hf_memopt.recipes.reflow import demo, demo_commands

TARGET_RATIO = 0.5  # upper limit of the student's one-step error over the teacher's

# Flags of each variant, added to those of the demo's student.
VARIANTS: dict[str, list[str]] = {
    "ushaped": ["--policy.reflow_time_sampling=ushaped"],
    "huber": ["--policy.reflow_loss=huber"],
    "demonstrations": ["--policy.reflow_real_data=0.2"],
    "seeded": ["--policy.couplings_seed=0", "--policy.couplings_per_frame=4"],
    "self": ["--policy.reflow_target=self"],
    "round2": [],
}


def run_seed(seed: int, folder: Path, variants: list[str]) -> dict[str, Any]:
    output = folder / f"seed-{seed}"
    demo = [sys.executable, "-m", "hf_memopt.recipes.reflow.demo", "--output", str(output), "--seed", str(seed)]
    subprocess.run(demo, check=True)
    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    found = {name: run_variant(name, argparse.Namespace(output=output, seed=seed)) for name in variants}
    rates = {title: results[title] for title in ("passing_rates", "zigzag_rates")}
    return {"seed": seed, **results["evaluation"], **rates, "variants": found}


def run_variant(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one more student of the demo in `options.output`."""
    output = options.output
    start = output / "student_init"
    if name == "round2":
        start = output / "round2_init"
        prepare = ["hf-memopt", "prepare-student", "--teacher", output / "student", "--output", start]
        demo_commands.run(output, "prepare-round2", prepare)
    train_variant(name, VARIANTS[name], start, options)
    compared = output / f"{name}_evaluation"
    evaluate = ["hf-memopt", "evaluate", "--policy", output / name, "--teacher", output / "teacher"]
    demo_commands.run(output, f"evaluate-{name}", [*evaluate, "--output", compared])
    student: dict[str, Any] = json.loads((compared / "evaluation.json").read_text())["student"]
    return student


def train_variant(name: str, flags: list[str], start: Path, options: argparse.Namespace) -> None:
    """Train a student as the demo in `options.output` does, with more flags, from `start` into a folder `name`."""
    output = options.output / name
    changed = {"--policy.path": f"--policy.path={start}", "--output_dir": f"--output_dir={output}"}
    command = [changed.get(word.partition("=")[0], word) for word in map(str, demo.student_command(options))]
    demo_commands.run(options.output, name, [*command, *flags])


def ratio(seed: dict[str, Any]) -> float:
    """Return the one-step error, student over teacher."""
    value: float = seed["student"]["error"]["1"] / seed["teacher"]["error"]["1"]
    return value


def print_report(results: dict[str, Any]) -> None:
    rows = []
    for seed in results["seeds"]:
        met = "met" if ratio(seed) <= results["target_ratio"] else "missed"
        pairs = [f"{seed['teacher'][key]:.4f} -> {seed['student'][key]:.4f}" for key in ("normalized_straightness",)]
        errors = [f"{seed['teacher']['error'][steps]:.3f} / {seed['student']['error'][steps]:.3f}" for steps in "124"]
        rows.append([str(seed["seed"]), *errors, f"{ratio(seed):.3f}", f"{results['target_ratio']} {met}", *pairs])
    print_table(["seed", "1 step", "2 steps", "4 steps", "1-step ratio", "target", "straightness"], rows)
    columns = [(name, steps) for name in ("teacher", "student") for steps in ("10", "1")]
    rows = [
        [str(seed["seed"]), title, *(f"{seed[f'{rate}_rates'][name][steps]:.3f}" for name, steps in columns)]
        for seed in results["seeds"]
        for title, rate in (("passes the obstacle", "passing"), ("zigzags", "zigzag"))
    ]
    print_table(["seed", "share of chunks that", *(f"{name}, {steps}" for name, steps in columns)], rows)
    rows = [
        [str(seed["seed"]), name, *_figures(model)]
        for seed in results["seeds"]
        if seed.get("variants")
        for name, model in {"teacher": seed["teacher"], "demo": seed["student"], **seed["variants"]}.items()
    ]
    if rows:
        print_table(["seed", "student", "1-step error", "1-step error to data", "1-step spread", "straightness"], rows)


def _figures(model: dict[str, Any]) -> list[str]:
    one_step = [f"{model[figure]['1']:.3f}" for figure in ("error", "action_error", "spread")]
    return [*one_step, f"{model['normalized_straightness']:.4f}"]


def main() -> int:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[], help="default: none")
    options = parser.options()
    device = current_device()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [run_seed(seed, Path(folder), options.variants) for seed in options.seeds]
    facts = {**environment(device), "benchmark": "teacher.reflow_quality"}
    results = {**facts, "target_ratio": TARGET_RATIO, "seeds": seeds}
    finish(results, print_report, options.output, "reflow-quality", device)
    return 0 if all(ratio(seed) <= TARGET_RATIO for seed in seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
