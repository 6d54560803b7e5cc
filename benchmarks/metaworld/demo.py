"""Reflow in Meta-World, an environment of others: experts, a teacher, one-step students, success rates.

    python -m benchmarks.metaworld.demo --output outputs/demo_metaworld

records Meta-World's scripted experts, trains a small SmolVLA on them with stock `lerobot-train`, reflows it once from
cached couplings and once more with that student as the teacher, and lets all of them act with stock `lerobot-eval`.
Nothing is downloaded; a camera that numpy draws from the state takes the place of OpenGL. Every command that it runs is
printed. Results: `results.json` and `film_strip.png` in the output folder. Needs the extra `metaworld`.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.metaworld import REPO_ID
from hf_memopt.command_line import number, one_line_errors, script_imports
from hf_memopt.ranges import COUNT
from hf_memopt.recipes.common.results import drawn
from hf_memopt.recipes.reflow import demo_commands as commands

with script_imports("demo_metaworld", __name__):
    from benchmarks.metaworld.measurements import POLICIES, STUDENTS, TestedPolicy, measured, table
    from hf_memopt.recipes.reflow import smolvla_toy as toy

# The mean action, repeated, solves neither: `results.json` says how often.
TASKS = ("plate-slide-v3", "button-press-topdown-v3")
DEMONSTRATIONS_PER_TASK = 40
TEACHER_STEPS = 1500
TEACHER_LEARNING_RATE = 1.5e-3  # lower than that of the students, since the VLM is trained too
STUDENT_STEPS = 600
FIRST_TEST_SEED = 100_000  # far from the demonstrations' scenes
PARALLEL_EPISODES = 10
NUM_PICTURES = 8  # of an episode in the film strip

OUTPUTS = (
    *("vlm", "dataset", "teacher", "couplings", "student_init", "student", "student_1step"),
    *("second_init", "second", "second_1step", "evaluation", "logs", "results.json", "film_strip.png"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    check(options.tasks)
    from benchmarks.metaworld.demonstrations import record

    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # lerobot-eval imports the drawn environment
    begun = time.perf_counter()
    output = options.output
    commands.make_room(output, OUTPUTS, options.overwrite)
    with commands.stage(f"{options.demonstrations} demonstrations of each of {', '.join(options.tasks)}"):
        toy.write_vlm(output / "vlm")
        record(output / "dataset", options.tasks, options.demonstrations, options.seed)
    with commands.stage("The teacher: stock lerobot-train"):
        commands.run(output, "teacher", teacher_command(options))
    with commands.stage("A student, from couplings that the teacher makes in advance"):
        prepare(output, "teacher", "student_init")
        commands.run(output, "precompute", precompute_command(options))
        cached = f"--policy.couplings_path={output / 'couplings'}"
        commands.run(output, "student", student_command(options, "student", "student_init", cached))
    with commands.stage("A second round, with the student as the teacher at work"):
        prepare(output, "student", "second_init")
        commands.run(output, "second", student_command(options, "second", "second_init"))
    with commands.stage("Export: plain smolvla policies that take one step"):
        for name in STUDENTS:
            export = ["hf-memopt", "export", "--policy", output / name, "--output", output / f"{name}_1step"]
            commands.run(output, f"export_{name}", [*export, "--no-evaluation"])
    with commands.stage(f"{options.episodes} episodes of each task and policy: stock lerobot-eval"):
        for policy in POLICIES:
            commands.run(output, f"eval_{policy.name}", evaluation_command(options, policy))
    with commands.stage("Differences to the teacher, times, and the mean action as a baseline"):
        results = measured(output, options.tasks, options.episodes, options.test_seed)
        results = {"settings": settings(options), **results}
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw_film_strip(videos(output, options.tasks), output / "film_strip.png")
    print(table(results))
    print(f"\nDone in {(time.perf_counter() - begun) / 60:.0f} min. results.json and film_strip.png are in {output}.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = commands.demo_parser(__doc__, "outputs/demo_metaworld")
    add = parser.add_argument
    add("--tasks", type=tasks, default=TASKS, help=f"of Meta-World, with commas between (default: {','.join(TASKS)})")
    amounts = (
        ("--demonstrations", DEMONSTRATIONS_PER_TASK, "recorded episodes of each task"),
        ("--teacher-steps", TEACHER_STEPS, "batches that the teacher trains on"),
        ("--student-steps", STUDENT_STEPS, "batches that each student trains on"),
        ("--episodes", 50, "test episodes of each task for each policy"),
    )
    for flag, default, text in amounts:
        add(flag, type=number(COUNT), default=default, help=f"{text} (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.test_seed = FIRST_TEST_SEED + options.seed
    return options


def tasks(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must name tasks, each once, with commas between")
    return names


def check(names: Sequence[str]) -> None:
    if importlib.util.find_spec("metaworld") is None:
        raise ValueError("metaworld is not installed: pip install 'hf_memopt[metaworld]'")
    from benchmarks.metaworld.environment import check_task

    for name in names:
        check_task(name)


def teacher_command(options: argparse.Namespace) -> list[Any]:
    return [
        "lerobot-train",
        *toy.policy_flags(options.output / "vlm"),
        "--policy.self_attn_every_n_layers=1",  # learns in fewer batches than with lerobot's 2
        *vlm_flags(frozen=False),
        "--policy.device=cpu",
        *flags(options, "teacher", options.teacher_steps, TEACHER_LEARNING_RATE),
    ]


def vlm_flags(*, frozen: bool) -> list[str]:
    """Say whether the VLM is trained: the teacher's starts with random weights; students share its learnt weights."""
    word = str(frozen).lower()
    return [f"--policy.train_expert_only={word}", f"--policy.freeze_vision_encoder={word}"]


def prepare(output: Path, teacher: str, name: str) -> None:
    command = ["hf-memopt", "prepare-student", "--teacher", output / teacher, "--output", output / name]
    commands.run(output, f"prepare_{name}", command)


def student_command(options: argparse.Namespace, name: str, start: str, *more: str) -> list[Any]:
    launch = commands.reflow_launch(options.output / start)
    return [*launch, *more, *vlm_flags(frozen=True), *flags(options, name, options.student_steps)]


def precompute_command(options: argparse.Namespace) -> list[Any]:
    couplings = options.output / "couplings"
    return [
        *("hf-memopt", "precompute", "--output", couplings, f"--batch-size={commands.BATCH_SIZE}", "--"),
        f"--policy.path={options.output / 'student_init'}",
        *vlm_flags(frozen=True),
        *toy.dataset_flags(options.output / "dataset", REPO_ID),
        "--policy.couplings_seed=0",
        "--policy.couplings_per_frame=1",
    ]


def flags(
    options: argparse.Namespace, name: str, steps: int, learning_rate: float = commands.LEARNING_RATE
) -> list[str]:
    output, warmup_steps = options.output / name, steps // 15
    training = commands.training_flags(output, steps, warmup_steps, options.seed, learning_rate=learning_rate)
    return [*toy.dataset_flags(options.output / "dataset", REPO_ID), *training]


def evaluation_command(options: argparse.Namespace, policy: TestedPolicy) -> list[Any]:
    folder = options.output / policy.folder
    return [
        "lerobot-eval",
        f"--policy.path={folder / 'checkpoints/last/pretrained_model' if policy.folder == 'teacher' else folder}",
        f"--policy.num_steps={policy.num_steps}",
        "--policy.device=cpu",
        "--env.discover_packages_path=benchmarks.metaworld",
        "--env.type=metaworld_drawn",
        f"--env.task={','.join(options.tasks)}",
        f"--eval.n_episodes={options.episodes}",
        f"--eval.batch_size={min(options.episodes, PARALLEL_EPISODES)}",
        f"--seed={options.test_seed}",
        f"--output_dir={options.output / 'evaluation' / policy.name}",
    ]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("seed", "demonstrations", "teacher_steps", "student_steps", "episodes")
    return {"tasks": list(options.tasks), **{name: getattr(options, name) for name in names}}


def videos(output: Path, names: Sequence[str]) -> dict[str, Path]:
    shown = (POLICIES[0], next(policy for policy in POLICIES if policy.num_steps == 1 and policy.folder != "teacher"))
    return {
        f"{task}: {policy.title_with_steps}": output / f"evaluation/{policy.name}/videos/{task}_0/eval_episode_0.mp4"
        for task in names
        for policy in shown
    }


def draw_film_strip(videos: Mapping[str, Path], file: Path) -> None:
    with drawn(file, len(videos), NUM_PICTURES, figsize=(NUM_PICTURES, 1.25 * len(videos)), squeeze=False) as grid:
        for row, (title, video) in zip(grid, videos.items(), strict=True):
            frames, seconds = read_video(video)
            for axes, index in zip(row, evenly(len(frames)), strict=True):
                axes.imshow(frames[index])
                axes.set(xticks=[], yticks=[])
                axes.set_xlabel(f"{index * seconds / len(frames):.2f} s", fontsize=7)
            # A title wider than its picture would push the next one away; so an empty one keeps the height for it.
            row[0].text(0, 1.08, title, transform=row[0].transAxes, fontsize=8).set_in_layout(False)
            row[1].set_title(" ", fontsize=8)


def evenly(num_frames: int) -> Sequence[int]:
    return [round(each) for each in np.linspace(0, num_frames - 1, NUM_PICTURES)]


def read_video(file: Path) -> tuple[list[NDArray[np.uint8]], float]:
    import av

    with av.open(str(file)) as container:
        frames: list[Any] = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = container.streams.video[0].average_rate
    if not frames or rate is None:
        raise ValueError(f"{file} holds no pictures; evaluate again")
    return frames, len(frames) / float(rate)


if __name__ == "__main__":
    sys.exit(one_line_errors("demo_metaworld", main))
