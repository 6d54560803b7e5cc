"""A student that teaches itself beside one that its teacher teaches, on the demo's task.

    python -m benchmarks.teacher.self_target

Each seed runs the demo (`make demo`), whose student learns from its teacher's pairs. Then students with
`reflow_target=self` train from the same start, for as many steps, half of their samples on targets of their own present
weights. All are compared with the teacher's ten steps. No accelerator is needed; ten minutes per seed on two quiet
cores. With `--folder`, parts that are there already are not trained again.
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIB, BenchmarkParser, current_device, environment, finish, print_rows
from benchmarks.teacher.reflow_quality import train_variant
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.recipes.reflow import demo
from hf_memopt.recipes.reflow.demo_measurements import Demo

NUM_ROUNDS = 31
# By folder: the title and the flags that are added to those of the demo's student.
SELF = ["--policy.reflow_target=self"]
STUDENTS: dict[str, tuple[str, list[str]]] = {
    "student": ("teacher's pairs", []),
    "self_2": ("itself, in 2 steps", SELF),
    "self_10": ("itself, in 10 steps", [*SELF, "--policy.teacher_num_steps=10"]),
}


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    output = folder / f"seed-{seed}"
    if not (output / "results.json").exists():
        made = ["-m", "hf_memopt.recipes.reflow.demo", "--output", str(output), "--seed", str(seed), "--overwrite"]
        subprocess.run([sys.executable, *made], check=True)
    for name, (_, flags) in STUDENTS.items():
        if not (output / name / "checkpoints" / "last").exists():
            train_variant(name, flags, output / "student_init", argparse.Namespace(output=output, seed=seed))
    torch.set_num_threads(1)
    demos = {name: Demo(output, demo.held_out_episodes(), seed, name) for name in STUDENTS}
    times = step_cpu_ms(demos)
    return {
        "seed": seed,
        "num_training_steps": demo.STUDENT_STEPS,
        "batch_size": len(next(iter(demos.values())).batches[0]["action"]),
        "students": {name: {**measured(found), "step_cpu_ms": times[name]} for name, found in demos.items()},
    }


def measured(found: Demo) -> dict[str, Any]:
    evaluation, rates = dataclasses.asdict(found.evaluation()), found.rates()
    return {
        **{side: {**evaluation[side], "success_rate": rates["passing_rates"][side]} for side in ("teacher", "student")},
        "zigzag_rate": rates["zigzag_rates"]["student"],
        "peak_bytes": peak_bytes(found),
    }


def peak_bytes(found: Demo) -> dict[str, int]:
    """Return the most bytes of any phase with a shared prefix, by where the teacher is between targets."""
    shared = found.step_bytes("on")
    saved = shared.pop("saved activations")
    homes = {"resident": {"teacher weights": shared["teacher weights"]}, "swapped": {}}
    by_phase = {home: found.phases(shared, saved, resident) for home, resident in homes.items()}
    return {home: max(sum(held.values()) for held in phases.values()) for home, phases in by_phase.items()}


def step_cpu_ms(demos: dict[str, Demo]) -> dict[str, float]:
    """Return the median CPU time of a training step, the students' steps in turn, so that all meet the same machine."""
    steps = {name: _step(found) for name, found in demos.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(NUM_ROUNDS):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def _step(found: Demo) -> Callable[[], None]:
    policy = SmolVLAReflowPolicy.from_pretrained(found.student_folder).train()
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=1e-6)

    def step() -> None:
        loss, _ = policy(found.batches[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.update()

    return step


def print_report(results: dict[str, Any]) -> None:
    rows = []
    for seed in results["seeds"]:
        teacher = seed["students"]["student"]["teacher"]
        for steps in ("10", "1"):
            policy = f"the teacher in {steps} step{'s' * (steps != '1')}"
            rows.append({"seed": str(seed["seed"]), "policy": policy, **_quality(teacher, steps)})
        for name, found in seed["students"].items():
            cost = {
                "peak MiB, teacher resident": f"{found['peak_bytes']['resident'] / MIB:.2f}",
                "swapped": f"{found['peak_bytes']['swapped'] / MIB:.2f}",
                "CPU ms per training step": f"{found['step_cpu_ms']:.0f}",
            }
            quality = _quality(found["student"], "1")
            rows.append({"seed": str(seed["seed"]), "policy": STUDENTS[name][0], **quality, **cost})
    print_rows(rows)


def _quality(model: dict[str, Any], steps: str) -> dict[str, str]:
    by_steps = {str(key): value for key, value in model["error"].items()}
    rates = {str(key): value for key, value in model["success_rate"].items()}
    return {"error": f"{by_steps[steps]:.3f}", "success": f"{rates[steps]:.1%}"}


def main() -> int:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--folder", type=Path, help="keep the demos here, and go on with those that are here")
    options = parser.options()
    device = current_device()
    with tempfile.TemporaryDirectory() as temporary:
        seeds = [run_seed(seed, options.folder or Path(temporary)) for seed in options.seeds]
    results = {**environment(device), "benchmark": "teacher.self_target", "seeds": seeds}
    finish(results, print_report, options.output, "self-target", device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
