"""The whole job on a laptop CPU: a teacher, a student that needs one Euler step, and the proof that it works.

    python -m hf_memopt.recipes.reflow.demo --output outputs/demo

makes a small dataset and a small SmolVLA, trains a teacher with stock `lerobot-train`, prepares, reflows and exports a
student, and evaluates all three on episodes that neither has seen. Nothing is downloaded. Every command that it runs is
printed, so that it can be repeated on real data. Results: `results.json` and four figures in the output folder.
"""

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

# Where FFmpeg is missing, importing lerobot prints five tracebacks; the demo's data holds no videos.
logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)

from hf_memopt.command_line import Parser, check_output_folder, number, one_line_errors  # noqa: E402
from hf_memopt.ranges import SEED  # noqa: E402
from hf_memopt.recipes.reflow import smolvla_toy as toy  # noqa: E402
from hf_memopt.text_table import Cell, Table  # noqa: E402
from hf_memopt.units import KIB  # noqa: E402

NUM_EPISODES = 100
HELD_OUT = 0.2
TEACHER_STEPS = 510
STUDENT_STEPS = 600
BATCH_SIZE = 16
LEARNING_RATE = 3e-3

# What a run leaves behind, and so what --overwrite removes.
OUTPUTS = ("toy", "teacher", "student_init", "student", "student_1step", "logs", "results.json", "figures")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begun = time.perf_counter()
    make_room(options.output, OUTPUTS, options.overwrite)
    toy_folder = options.output / "toy"
    with stage(f"A small SmolVLM and {NUM_EPISODES} demonstrations of a task with two right answers"):
        toy.write_vlm(toy_folder / "vlm")
        toy.write_dataset(toy_folder / "dataset", NUM_EPISODES, seed=options.seed)
    with stage("The teacher: stock lerobot-train"):
        run(options.output, "teacher", teacher_command(options))
    with stage("A student that starts from the teacher"):
        teacher, student = options.output / "teacher", options.output / "student_init"
        run(options.output, "prepare", ["hf-memopt", "prepare-student", "--teacher", teacher, "--output", student])
    with stage("Reflow, with the teacher's weights in host memory"):
        run(options.output, "student", student_command(options))
    with stage("Export: a plain smolvla policy that takes one step"):
        student, exported = options.output / "student", options.output / "student_1step"
        run(options.output, "export", ["hf-memopt", "export", "--policy", student, "--output", exported])
    with stage("Where is the teacher?"):
        report = run(options.output, "doctor", ["hf-memopt", "doctor", "--policy", student])
        print(report[report.index("Policy ") :].rstrip())
    with stage("Evaluation on held-out episodes, and figures"):
        # lerobot prints as it loads.
        with (options.output / "logs" / "evaluation.log").open("w") as log, redirect_stdout(log):
            results = evaluate(options)
    print_summary(results)
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Results and figures: {options.output}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("outputs/demo"), help="folder for everything (default: %(default)s)")
    add("--seed", type=number(SEED), default=0, help="of data and training (default: %(default)s)")
    add("--overwrite", action="store_true", help="first remove what an earlier demo wrote to the folder")
    return parser.parse_args(arguments)


def make_room(output: Path, names: Sequence[str], overwrite: bool) -> None:
    """Refuse a folder that is in use; with `overwrite`, remove what a demo writes, `names`, and nothing else."""
    check_output_folder("output", output)
    present = [name for name in names if (output / name).exists()]
    if present and not overwrite:
        raise ValueError(
            f"output={str(output)!r} already holds {', '.join(present)}; replace them with --overwrite or name another"
        )
    for name in present:
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (output / "logs").mkdir(parents=True)


def teacher_command(options: argparse.Namespace) -> list[Any]:
    return [
        "lerobot-train",
        *toy.policy_flags(options.output / "toy" / "vlm"),
        "--policy.device=cpu",
        *training_flags(options, "teacher", TEACHER_STEPS),
    ]


def student_command(options: argparse.Namespace) -> list[Any]:
    return [
        *("accelerate", "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"),
        *("--dynamo_backend=no", "-m", "hf_memopt.recipes.reflow_smolvla"),
        f"--policy.path={options.output / 'student_init'}",
        "--policy.teacher_offload=swap",  # on a CPU "auto" would not offload
        *training_flags(options, "student", STUDENT_STEPS),
    ]


def training_flags(options: argparse.Namespace, name: str, steps: int) -> list[Any]:
    return [
        *toy.dataset_flags(options.output / "toy" / "dataset"),
        # One process reads data while another trains; forking it spares a second import of everything.
        "--num_workers=1",
        f"--dataloader_multiprocessing_context={'fork' if sys.platform == 'linux' else 'spawn'}",
        f"--dataset.eval_split={HELD_OUT}",
        f"--output_dir={options.output / name}",
        f"--batch_size={BATCH_SIZE}",
        f"--steps={steps}",
        f"--log_freq={steps // 30}",
        f"--seed={1000 + options.seed}",
        f"--policy.optimizer_lr={LEARNING_RATE}",
        f"--policy.scheduler_warmup_steps={steps // 10}",
        f"--policy.scheduler_decay_steps={steps}",
    ]


def run(output: Path, name: str, command: list[Any]) -> str:
    """Run a command of this environment; shows its progress bars, keeps its whole output in logs/ and returns it."""
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    words[0] = str(Path(sys.executable).parent / words[0])
    # Models of this size get slower with more threads.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = output / "logs" / f"{name}.log"
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        text = b""
        while chunk := os.read(process.stdout.fileno(), 2**16):
            text += chunk
            show_progress(chunk)
    log.write_bytes(text)
    decoded = text.decode(errors="replace")
    if process.returncode:
        print(decoded[-3000:])
        sys.exit(f"demo: the command failed with status {process.returncode}; its whole output is in {log}")
    return decoded


def show_progress(chunk: bytes) -> None:
    """Pass on the newest progress bar of a piece of output."""
    bars = re.findall(rb"(?:Training|evaluate \w+): [^\r\n]*\]", chunk)
    if bars:
        print("\r" + bars[-1].decode(errors="replace")[:110], end="", flush=True)
        if b"100%" in bars[-1]:
            print(flush=True)


@contextmanager
def stage(title: str) -> Iterator[None]:
    print(f"\n=== {title}", flush=True)
    begun = time.perf_counter()
    yield
    print(f"    {time.perf_counter() - begun:.0f} s", flush=True)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, write `results.json` with its figures beside it, and return what is in it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from hf_memopt.recipes.reflow import demo_figures as figures
    from hf_memopt.recipes.reflow.demo_measurements import Demo, learning_curve

    torch.set_num_threads(1)
    # lerobot holds out the last episodes.
    demo = Demo.load(options.output, range(round(NUM_EPISODES * (1 - HELD_OUT)), NUM_EPISODES), options.seed)
    results = {
        "seed": options.seed,
        "evaluation": demo.evaluation().to_dict(),
        "passing_rates": demo.passing_rates(),
        "memory_bytes": demo.memory(),
        "learning_curves": {
            name: learning_curve((options.output / "logs" / f"{name}.log").read_text(errors="replace"), steps)
            for name, steps in (("teacher", TEACHER_STEPS // 30), ("student", STUDENT_STEPS // 30))
        },
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=2))
    folder = options.output / "figures"
    folder.mkdir()
    figures.draw_errors(results["evaluation"], results["passing_rates"], folder / "error_by_steps.png")
    figures.draw_paths(demo.sampled_paths(), folder / "sampled_paths.png")
    figures.draw_learning(results["learning_curves"], folder / "learning_curves.png")
    figures.draw_memory(results["memory_bytes"], folder / "memory_by_phase.png")
    return results


def print_summary(results: dict[str, Any]) -> None:
    evaluation = results["evaluation"]
    teacher, student = evaluation["teacher"], evaluation["student"]
    few = (1, evaluation["teacher_num_steps"])
    print(f"\n{evaluation['num_observations']} held-out observations, normalised actions, the same noise for all\n")
    passing = results["passing_rates"]
    figures = (
        ("difference to the teacher", teacher["error"], student["error"], teacher["error"]),
        ("difference to the data", teacher["action_error"], student["action_error"], few),
        ("spread over noise", teacher["spread"], student["spread"], few),
        ("ms per chunk", teacher["latency_ms"], student["latency_ms"], few),
        ("passes the obstacle", passing["teacher"], passing["student"], few),
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
