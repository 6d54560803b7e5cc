"""The `hf-memopt` command. Subcommands import what they need when they run, so that `--help` is quick."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memopt import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; user errors go to standard error and give exit status 2."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # lerobot prints five tracebacks where FFmpeg is missing, and then reads video by other means.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    try:
        parsed.run(parsed)
    except ValueError as error:
        print(f"hf-memopt {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-memopt", description="Train in the memory you have.")
    parser.add_argument("--version", action="version", version=f"hf_memopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_prepare_student(commands)
    _add_export(commands)
    _add_doctor(commands)
    return parser


def _add_prepare_student(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("prepare-student", help="make a SmolVLA student that starts from its teacher")
    parser.add_argument("--teacher", required=True, help="smolvla checkpoint folder, training output folder or hub id")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.set_defaults(run=_prepare_student)


def _prepare_student(parsed: argparse.Namespace) -> None:
    from hf_memopt.integrations.lerobot.students import prepare_student

    output = prepare_student(parsed.teacher, parsed.output)
    print(
        f"{output} is ready. Train it with\n"
        f"  accelerate launch -m hf_memopt.recipes.reflow_smolvla --policy.path={output} --dataset.repo_id=<repo>\n"
        "or, in lerobot's own loop, with\n"
        "  lerobot-train --discover_packages_path=hf_memopt.integrations.lerobot "
        f"--policy.path={output} --dataset.repo_id=<repo>"
    )


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="turn a trained student into a plain smolvla policy",
        description="Write a plain smolvla policy that stock lerobot loads, with a model card. The card holds the "
        "student's and the teacher's errors by number of Euler steps, measured on the training run's held-out episodes "
        "(or on the episodes given here), unless --no-evaluation.",
    )
    parser.add_argument("--policy", required=True, help="trained student: checkpoint or training output folder, hub id")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.add_argument("--num-steps", type=int, default=1, help="Euler steps per action chunk (default: %(default)s)")
    parser.add_argument("--dataset-repo-id", help="measure on this dataset (default: the training run's)")
    parser.add_argument("--dataset-root", type=Path, help="its local folder")
    parser.add_argument("--episodes", type=_numbers, help="episodes to measure on, e.g. 40,41,42 (default: held out)")
    parser.add_argument(
        "--no-evaluation", dest="evaluate", action="store_false", help="do not measure; the card says so"
    )
    parser.add_argument("--push-to-hub", metavar="REPO_ID", help="upload the result to this hub repository")
    parser.add_argument("--private", action="store_true", help="make that repository private")
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> None:
    from hf_memopt.integrations.lerobot.model_card import Observations, measure, write_card
    from hf_memopt.integrations.lerobot.students import check_new, export_student, push_to_hub

    check_new(parsed.output)  # before minutes are spent on measuring
    given = None
    if parsed.dataset_repo_id:
        given = Observations(parsed.dataset_repo_id, parsed.dataset_root, parsed.episodes, held_out=False)
    measured = measure(parsed.policy, given) if parsed.evaluate else None
    card = write_card(parsed.policy, parsed.num_steps, measured)
    print(f"exported to {export_student(parsed.policy, parsed.output, parsed.num_steps, card)}")
    if parsed.push_to_hub:
        print(f"pushed to {push_to_hub(parsed.output, parsed.push_to_hub, parsed.private)}")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="say where a policy's teacher lives and what it costs")
    parser.add_argument("--policy", required=True, help="student: checkpoint or training output folder, hub id")
    parser.add_argument("--device", help="where the student would train (default: the accelerator, or cpu)")
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> None:
    from hf_memopt.integrations.lerobot.diagnosis import diagnose

    print(diagnose(parsed.policy, parsed.device))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
