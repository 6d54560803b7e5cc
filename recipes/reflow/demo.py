"""The whole job on a laptop CPU: a teacher, a student that needs one Euler step, and the proof that it works.

    python -m hf_memopt.recipes.reflow.demo --output outputs/demo

makes a small dataset and a small SmolVLA, trains a teacher with stock `lerobot-train`, prepares, reflows and exports a
student, and evaluates both on episodes that neither has seen. Nothing is downloaded. Every command that it runs is
printed, so that it can be repeated on real data. Results: `results.json`, four figures and `report/report.html` in the
output folder. They and the exported policy's model card have the figures of the last line, measured once.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from hf_memopt.command_line import one_line_errors, script_imports
from hf_memopt.recipes.reflow import demo_commands as commands
from hf_memopt.report.runs import Outcome, outcome_line
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import KIB

with script_imports("demo_reflow", __name__):
    from hf_memopt.recipes.reflow import smolvla_toy as toy

NUM_EPISODES = 400
HELD_OUT = 0.1
TEACHER_STEPS = 510
STUDENT_STEPS = 750
TEACHER_BATCH_SIZE = 64
TEACHER_LEARNING_RATE = 6e-3

# The files of a run, which --overwrite removes.
OUTPUTS = (
    *("toy", "teacher", "student_init", "student", "student_1step", "logs", "results.json", "figures", "evaluation"),
    "report",
)
STUDENT_EULER_STEPS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = commands.demo_parser(__doc__, "outputs/demo").parse_args(arguments)
    import matplotlib  # noqa: F401, for the figures, which come last

    begun = time.perf_counter()
    commands.make_room(options.output, OUTPUTS, options.overwrite)
    toy_folder = options.output / "toy"
    with commands.stage(f"A small SmolVLM and {NUM_EPISODES} demonstrations of a task with two right answers"):
        toy.write_vlm(toy_folder / "vlm")
        toy.write_dataset(toy_folder / "dataset", NUM_EPISODES, seed=options.seed)
    with commands.stage("The teacher: stock lerobot-train"):
        commands.run(options.output, "teacher", teacher_command(options))
    with commands.stage("A student that starts from the teacher"):
        teacher, student = options.output / "teacher", options.output / "student_init"
        commands.run(
            options.output, "prepare", ["hf-memopt", "prepare-student", "--teacher", teacher, "--output", student]
        )
    with commands.stage("Reflow, with the teacher's weights in host memory"):
        commands.run(options.output, "student", student_command(options))
    with commands.stage("Where is the teacher?"):
        student = options.output / "student"
        report = commands.run(options.output, "doctor", ["hf-memopt", "doctor", "--policy", student])
        print(report[report.index("Policy ") :].rstrip())
    with commands.stage("Evaluation on held-out episodes, and figures"):
        # lerobot prints as it loads.
        with (options.output / "logs" / "evaluation.log").open("w") as log, redirect_stdout(log):
            results = evaluate(options)
    print_summary(results)
    with commands.stage("Export: a plain smolvla policy that takes one step, with these figures in its card"):
        commands.run(options.output, "export", export_command(options))
    with commands.stage("A page of it all"):
        commands.run(options.output, "report", ["hf-memopt", "report", options.output])
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Page: {options.output / 'report' / 'report.html'}")
    print(outcome_line({name: Outcome(**found) for name, found in results["outcomes"].items()}))
    return 0


def teacher_command(options: argparse.Namespace) -> list[Any]:
    return [
        "lerobot-train",
        *toy.policy_flags(options.output / "toy" / "vlm"),
        "--policy.expert_width_multiplier=1.25",
        "--policy.device=cpu",
        *flags(options, "teacher", TEACHER_STEPS, learning_rate=TEACHER_LEARNING_RATE, batch_size=TEACHER_BATCH_SIZE),
    ]


def student_command(options: argparse.Namespace) -> list[Any]:
    return [
        *commands.reflow_launch(options.output / "student_init"),
        "--policy.teacher_offload=swap",  # on a CPU "auto" would not offload
        *flags(options, "student", STUDENT_STEPS),
    ]


def export_command(options: argparse.Namespace) -> list[Any]:
    policy, exported = options.output / "student", options.output / "student_1step"
    return [
        *("hf-memopt", "export", "--policy", policy, "--output", exported),
        *("--num-steps", STUDENT_EULER_STEPS, "--evaluation", options.output / "evaluation"),
    ]


def flags(options: argparse.Namespace, name: str, steps: int, **changes: Any) -> list[str]:
    return [
        *toy.dataset_flags(options.output / "toy" / "dataset"),
        f"--dataset.eval_split={HELD_OUT}",
        *commands.training_flags(options.output / name, steps, steps // 10, options.seed, **changes),
    ]


def held_out_episodes() -> range:
    """Return the episodes that no policy trains on: lerobot holds out the last ones."""
    return range(round(NUM_EPISODES * (1 - HELD_OUT)), NUM_EPISODES)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from hf_memopt.lerobot.student.model_card import write_evaluation
    from hf_memopt.recipes.reflow import demo_measurements as measured

    torch.set_num_threads(1)
    demo = measured.Demo(options.output, held_out_episodes(), options.seed)
    rates = demo.rates()
    evaluation = demo.evaluation().with_success(**rates["passing_rates"])
    write_evaluation(options.output / "evaluation", str(demo.student_folder), (evaluation, demo.observations))
    outcomes = evaluation.outcomes(STUDENT_EULER_STEPS)
    results = {
        "seed": options.seed,
        "device": evaluation.device,
        "outcomes": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
        "evaluation": dataclasses.asdict(evaluation),
        **rates,
        "memory_bytes": demo.memory(),
        "learning_curves": {
            name: measured.learning_curve((options.output / "logs" / f"{name}.log").read_text(errors="replace"), steps)
            for name, steps in (("teacher", TEACHER_STEPS // 30), ("student", STUDENT_STEPS // 30))
        },
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=2))
    folder = options.output / "figures"
    folder.mkdir()
    measured.draw_errors(results["evaluation"], results["passing_rates"], folder / "error_by_steps.png")
    measured.draw_paths(demo.sampled_paths(), folder / "sampled_paths.png")
    measured.draw_learning(results["learning_curves"], folder / "learning_curves.png")
    measured.draw_memory(results["memory_bytes"], folder / "memory_by_phase.png")
    return results


def print_summary(results: dict[str, Any]) -> None:
    evaluation = results["evaluation"]
    teacher, student = evaluation["teacher"], evaluation["student"]
    few = (1, evaluation["teacher_num_steps"])
    print(f"\n{evaluation['num_observations']} held-out observations, normalised actions, the same noise for all\n")
    passing, zigzag = results["passing_rates"], results["zigzag_rates"]
    figures = (
        ("difference to the teacher", teacher["error"], student["error"], teacher["error"]),
        ("difference to the data", teacher["action_error"], student["action_error"], few),
        ("spread over noise", teacher["spread"], student["spread"], few),
        ("ms per chunk", teacher["latency_ms"], student["latency_ms"], few),
        ("passes the obstacle", passing["teacher"], passing["student"], few),
        ("is on both sides of it", zigzag["teacher"], zigzag["student"], few),
    )
    rows: list[list[Cell]] = [
        [f"{title}, {steps} steps", of_teacher[steps], of_student[steps]]
        for title, of_teacher, of_student, all_steps in figures
        for steps in all_steps
    ]
    straightness = (found["normalized_straightness"] for found in (teacher, student))
    rows.append(["straightness (0 is straight)", *straightness])
    print(Table(["", "teacher", "student"], rows, digits=4))
    ratio = student["error"][1] / teacher["error"][1]
    print(f"\nThe student's one-step error is {ratio:.2f} of the teacher's (the aim is at most 0.5).")
    print_memory(results["memory_bytes"])


def print_memory(memory: dict[str, dict[str, dict[str, int]]]) -> None:
    print("\nKiB held on the device, counted (temporaries within an operation are not)\n")
    phases = list(next(iter(memory.values())))
    rows: list[list[Cell]] = [
        [design, *(sum(by_phase[phase].values()) / KIB for phase in phases)] for design, by_phase in memory.items()
    ]
    print(Table(["", *phases], rows, digits=0))


if __name__ == "__main__":
    sys.exit(one_line_errors("demo_reflow", main))
