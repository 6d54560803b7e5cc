"""The `hf-memopt` command. Subcommands import what they need when they run, so that `--help` is quick."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memopt import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; user errors go to standard error and give 2."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # lerobot prints five tracebacks where FFmpeg is missing, and then reads video by other means.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    try:
        status: int = parsed.run(parsed)
    except ValueError as error:
        print(f"hf-memopt {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-memopt", description="Train in the memory you have.")
    parser.add_argument("--version", action="version", version=f"hf_memopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_prepare_student(commands)
    _add_export(commands)
    _add_doctor(commands)
    _add_report(commands)
    return parser


def _add_prepare_student(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("prepare-student", help="make a SmolVLA student that starts from its teacher")
    parser.add_argument("--teacher", required=True, help="smolvla checkpoint folder, training output folder or hub id")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.set_defaults(run=_prepare_student)


def _prepare_student(parsed: argparse.Namespace) -> int:
    from hf_memopt.integrations.lerobot.students import prepare_student

    output = prepare_student(parsed.teacher, parsed.output)
    print(
        f"{output} is ready. Train it with\n"
        f"  accelerate launch -m hf_memopt.recipes.reflow_smolvla --policy.path={output} --dataset.repo_id=<repo>\n"
        "or, in lerobot's own loop, with\n"
        "  lerobot-train --discover_packages_path=hf_memopt.integrations.lerobot "
        f"--policy.path={output} --dataset.repo_id=<repo>"
    )
    return 0


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


def _export(parsed: argparse.Namespace) -> int:
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
    return 0


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has and which features are on; with --policy also where its teacher lives",
        description="Look at devices, their free memory and the speed of their links, host memory and its limits, "
        "versions, and which features of this library are on here.",
    )
    parser.add_argument("--policy", help="also look at a student: checkpoint or training output folder, hub id")
    parser.add_argument("--device", help="the device to look at, where the student would train (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="print problems only; exit status 1 if there are any")
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    from hf_memopt.diagnostics import examine, page

    machine = examine(parsed.device)
    policy_text = _diagnose(parsed) if parsed.policy else None
    if parsed.json:
        policy = {} if policy_text is None else {"policy": policy_text.splitlines()}
        print(json.dumps({**machine.to_dict(), **policy}, indent=2))
    elif parsed.quiet:
        print("".join(f"{problem}\n" for problem in machine.problems), end="")
    else:
        print("\n\n".join([page(machine), *([policy_text] if policy_text else [])]))
    return 1 if parsed.quiet and machine.problems else 0


def _diagnose(parsed: argparse.Namespace) -> str:
    from hf_memopt.integrations.lerobot.diagnosis import diagnose

    return diagnose(parsed.policy, parsed.device)


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "report",
        help="show a run's memory and time as an HTML page and figures",
        description="Write report.html, one file that needs no network, and its figures as PNG files.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder that a recipe, the demo or Trainer wrote")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--output", type=Path, help="folder to write to (default: RUN_DIR/report)")
    instead.add_argument("--json", action="store_true", help="print what was found as JSON, and write nothing")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> int:
    from hf_memopt.reporting import read_run, write_report

    run = read_run(parsed.run_dir)
    if parsed.json:
        print(json.dumps(run.to_dict(), indent=2))
        return 0
    print(f"report: {write_report(run, parsed.output or parsed.run_dir / 'report')}")
    for lacking in run.lacking:
        print(f"not in the report: {lacking}")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
