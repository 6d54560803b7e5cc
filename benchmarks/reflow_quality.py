"""How much of the teacher's one-step error reflow removes, on held-out episodes, over several seeds.

    python benchmarks/reflow_quality.py

runs the demo (`make demo`) once per seed, minutes each, and collects what it measured. Needs no accelerator.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import current_device, environment, print_table, results_path, write_results

TARGET_RATIO = 0.5  # the student's one-step error over the teacher's, at most


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """The demo's results for one seed."""
    output = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "hf_memopt.recipes.demo_reflow", "--output", str(output), "--seed", str(seed)]
    subprocess.run(command, check=True)
    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    return {"seed": seed, **results["evaluation"]}


def ratio(seed: dict[str, Any]) -> float:
    """One-step error, student over teacher."""
    value: float = seed["student"]["error"]["1"] / seed["teacher"]["error"]["1"]
    return value


def print_report(results: dict[str, Any]) -> None:
    """The table, one row per seed."""
    rows = []
    for seed in results["seeds"]:
        met = "met" if ratio(seed) <= results["target_ratio"] else "missed"
        pairs = [f"{seed['teacher'][key]:.4f} -> {seed['student'][key]:.4f}" for key in ("normalized_straightness",)]
        errors = [f"{seed['teacher']['error'][steps]:.3f} / {seed['student']['error'][steps]:.3f}" for steps in "124"]
        rows.append([str(seed["seed"]), *errors, f"{ratio(seed):.3f}", f"{results['target_ratio']} {met}", *pairs])
    print_table(["seed", "1 step", "2 steps", "4 steps", "1-step ratio", "target", "straightness"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    device = current_device()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [run_seed(seed, Path(folder)) for seed in options.seeds]
    results = {**environment(device), "benchmark": "reflow_quality", "target_ratio": TARGET_RATIO, "seeds": seeds}
    print_report(results)
    print("wrote", write_results(results, options.output or results_path("reflow-quality", device)))
    return 0 if all(ratio(seed) <= TARGET_RATIO for seed in seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
