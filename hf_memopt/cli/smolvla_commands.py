"""`hf-memopt prepare-student`, `precompute`, `evaluate` and `export`: students and their teachers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.command_line import check_output_folder, number, numbers
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO

if TYPE_CHECKING:
    from hf_memopt.lerobot.student.model_card import Measured, Observations


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_prepare_student(commands)
    _add_precompute(commands)
    _add_evaluate(commands)
    _add_export(commands)


def _add_prepare_student(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "prepare-student", help="make a SmolVLA, π0 or π0.5 student that starts from its teacher"
    )
    parser.add_argument(
        "--teacher", required=True, help="smolvla, pi0 or pi05 checkpoint folder, training output folder or hub id"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.set_defaults(run=_prepare_student)


def _prepare_student(parsed: argparse.Namespace) -> int:
    check_output_folder("output", parsed.output)
    from hf_memopt.lerobot.student.prepare import prepare_student

    output = prepare_student(parsed.teacher, parsed.output)
    print(
        f"{output} is ready. Train it with\n"
        f"  accelerate launch -m hf_memopt.recipes.reflow_smolvla --policy.path={output} --dataset.repo_id=<repo>\n"
        "or, in lerobot's own loop, with\n"
        f"  lerobot-train --policy.path={output} --dataset.repo_id=<repo>"
    )
    return 0


def _add_precompute(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "precompute",
        help="write a reflow run's couplings to disk, so that it needs no teacher",
        usage="hf-memopt precompute --output FOLDER [options] -- --policy.path=STUDENT --dataset.repo_id=REPO ...",
        description="Write pairs of noise and actions for every frame. Put the flags of the training run behind --, "
        "and later pass --policy.couplings_path=FOLDER to that run as well. Run it again to go on after an "
        "interruption, and with `accelerate launch -m hf_memopt.cli precompute` to share the work.",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to create, or to complete")
    parser.add_argument(
        "--batch-size",
        type=number(COUNT),
        default=1,
        help="frames that the teacher solves together; more is faster, and rounds differently (default: %(default)s, "
        "which is bit for bit what training online with --policy.couplings_seed gets)",
    )
    parser.add_argument(
        "--shard-size", type=number(COUNT), default=1024, help="couplings per file (default: %(default)s)"
    )
    parser.add_argument(
        "--store-observations", action="store_true", help="keep the observations too; random augmentation needs this"
    )
    parser.add_argument("training_flags", nargs="+", metavar="FLAG", help="flags of the training run, behind --")
    parser.set_defaults(run=_precompute)


def _precompute(parsed: argparse.Namespace) -> int:
    check_output_folder("output", parsed.output)
    from hf_memopt.lerobot.precompute_pairs import precompute_for_policy

    missing = precompute_for_policy(
        parsed.training_flags,
        parsed.output,
        batch_size=parsed.batch_size,
        shard_size=parsed.shard_size,
        store_observations=parsed.store_observations,
    )
    if missing:
        print(f"{parsed.output}: {len(missing)} shards are left to other processes")
    else:
        print(f"{parsed.output} is complete. Train with --policy.couplings_path={parsed.output}")
    return 0


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="compare a reflowed student with its teacher, by number of Euler steps",
        description="Measure error, spread over noise and latency by number of Euler steps, and straightness, on the "
        "training run's held-out episodes (or on the episodes given here). Prints a table; writes evaluation.json and "
        "evaluation.png. With --env, also the success rate in a gymnasium environment.",
    )
    parser.add_argument("--policy", required=True, help="trained student: checkpoint or training output folder, hub id")
    parser.add_argument("--output", required=True, type=Path, help="folder to write to")
    parser.add_argument("--teacher", help="to compare with (default: the one that the student names)")
    parser.add_argument(
        "--num-steps", type=numbers(COUNT), default=[1, 2, 4, 10], help="Euler steps (default: 1,2,4,10)"
    )
    parser.add_argument("--device", default="cpu", help="where both run (default: %(default)s)")
    _add_observations(parser)
    parser.add_argument(
        "--env", metavar="ID", help="gymnasium environment with lerobot's conventions, e.g. package:Name-v0"
    )
    parser.add_argument(
        "--env-episodes", type=number(COUNT), default=10, help="for each number of steps (default: %(default)s)"
    )
    parser.set_defaults(run=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    check_output_folder("output", parsed.output)
    from hf_memopt.lerobot.evaluate.measure import table
    from hf_memopt.lerobot.evaluate.rollouts import evaluate_in_environment
    from hf_memopt.lerobot.student.model_card import measure, write_evaluation
    from hf_memopt.report.doctor import find_devices

    find_devices(parsed.device)
    rollouts = None
    if parsed.env:
        rollouts = evaluate_in_environment(
            parsed.policy, parsed.env, parsed.num_steps, num_episodes=parsed.env_episodes, device=parsed.device
        )
    evaluation, observations = measure(
        parsed.policy, _observations(parsed), teacher=parsed.teacher, num_steps=parsed.num_steps, device=parsed.device
    )
    if rollouts:
        evaluation = evaluation.with_success(student={steps: found.success_rate for steps, found in rollouts.items()})
    print(f"{evaluation.num_observations} observations from {observations.describe()}\n")
    print(table(evaluation, rollouts))
    if warning := evaluation.shortcoming(min(parsed.num_steps)):
        print(f"\n{warning}")
    for file in write_evaluation(parsed.output, parsed.policy, (evaluation, observations), rollouts):
        print(f"wrote {file}")
    return 0


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="turn a trained student into a plain smolvla, pi0 or pi05 policy",
        description="Write a plain smolvla, pi0 or pi05 policy that stock lerobot loads, with a model card. The card "
        "has the student's and the teacher's errors by number of Euler steps, measured on the training run's held-out "
        "episodes (or on the episodes given here), unless --no-evaluation.",
    )
    parser.add_argument("--policy", required=True, help="trained student: checkpoint or training output folder, hub id")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.add_argument(
        "--num-steps", type=number(COUNT), default=1, help="Euler steps per action chunk (default: %(default)s)"
    )
    _add_observations(parser)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--evaluation", type=Path, help="folder that `evaluate` wrote for this policy; the card has its figures"
    )
    measured.add_argument(
        "--no-evaluation", dest="evaluate", action="store_false", help="do not measure; the card says so"
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="of a student trained with --peft.*: write its adapter alone, which needs the policy that it was trained "
        "on (default: its weights with the adapter merged)",
    )
    parser.add_argument("--push-to-hub", metavar="REPO_ID", help="upload the result to this hub repository")
    parser.add_argument("--private", action="store_true", help="make that repository private")
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> int:
    check_output_folder("output", parsed.output)
    from hf_memopt.lerobot.student.model_card import write_card
    from hf_memopt.lerobot.student.prepare import check_new, export_student, push_to_hub

    check_new(parsed.output)  # before minutes are spent on measuring
    measured = _measured(parsed) if parsed.evaluate else None
    card = write_card(parsed.policy, parsed.num_steps, measured)
    exported = export_student(parsed.policy, parsed.output, parsed.num_steps, card, adapter_only=parsed.adapter_only)
    print(f"exported to {exported}")
    if parsed.push_to_hub:
        print(f"pushed to {push_to_hub(parsed.output, parsed.push_to_hub, parsed.private)}")
    return 0


def _measured(parsed: argparse.Namespace) -> "Measured":
    from hf_memopt.lerobot.student.model_card import measure, read_evaluation

    if parsed.evaluation is None:
        return measure(parsed.policy, _observations(parsed))
    if parsed.dataset_repo_id or parsed.dataset_root or parsed.episodes:
        raise ValueError(
            f"evaluation={str(parsed.evaluation)!r} has been measured on its own data; leave out --dataset-repo-id, "
            "--dataset-root and --episodes"
        )
    return read_evaluation(parsed.evaluation, parsed.policy)


def _add_observations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-repo-id", help="measure on this dataset (default: the training run's)")
    parser.add_argument("--dataset-root", type=Path, help="its local folder")
    parser.add_argument(
        "--episodes",
        type=numbers(COUNT_OR_ZERO),
        help="its episodes to measure on, e.g. 40,41 (default: those that training held out; of another dataset, all)",
    )


def _observations(parsed: argparse.Namespace) -> "Observations | None":
    from hf_memopt.lerobot.files.policy_files import resolve_checkpoint
    from hf_memopt.lerobot.student.model_card import Observations, training_observations

    if parsed.dataset_root and not parsed.dataset_repo_id:
        raise ValueError(f"dataset_root={str(parsed.dataset_root)!r} needs --dataset-repo-id, the name of that dataset")
    if not parsed.dataset_repo_id:
        return training_observations(resolve_checkpoint(parsed.policy), parsed.episodes) if parsed.episodes else None
    return Observations(parsed.dataset_repo_id, parsed.dataset_root, parsed.episodes, held_out=False)
