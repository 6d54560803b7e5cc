"""`hf-memopt doctor` and `report`: the abilities of a machine, and the figures of a run."""

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from hf_memopt.command_line import check_output_folder


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_doctor(commands)
    _add_report(commands)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has; with --policy also where its teacher lives",
        description="Look at devices, their free memory and the speed of their links, host memory and its limits, and "
        "versions.",
    )
    parser.add_argument("--policy", help="also look at a student: checkpoint or training output folder, hub id")
    parser.add_argument("--device", help="the device to look at, where the student would train (default: all)")
    parser.add_argument("--disk", metavar="FOLDER", help="also measure the disk of a folder, for offloading to it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="print problems only; exit status 1 if there are any")
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    from hf_memopt.report.doctor import examine, page

    machine = examine(parsed.device, parsed.disk)
    policy_text = None
    if parsed.policy:
        from hf_memopt.lerobot.student.diagnosis import diagnose

        with redirect_stdout(sys.stderr):  # lerobot prints while it loads
            policy_text = diagnose(parsed.policy, parsed.device)
    if parsed.json:
        policy = {} if policy_text is None else {"policy": policy_text.splitlines()}
        print(json.dumps({**machine, **policy}, indent=2))
    elif parsed.quiet:
        print("".join(f"{problem}\n" for problem in machine["problems"]), end="")
    else:
        print("\n\n".join([page(machine), *([policy_text] if policy_text else [])]))
    return 1 if parsed.quiet and machine["problems"] else 0


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "report",
        help="show a run's memory and time as an HTML page and figures",
        description="Write report.html, one file that needs no network, and its figures as PNG files.",
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="folder that a recipe, the demo or Trainer wrote, or a folder of such folders",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--output", type=Path, help="folder to write to (default: RUN_DIR/report)")
    instead.add_argument("--json", action="store_true", help="print the findings as JSON, and write nothing")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> int:
    check_output_folder("output", parsed.output)
    from hf_memopt.report import read_run, run_folders, write_report

    folders = run_folders(parsed.run_dir) or [parsed.run_dir]  # reading the latter names the missing files
    runs = {}
    for folder in folders:
        try:
            runs[folder] = read_run(folder)
        except ValueError as error:
            if len(folders) == 1:
                raise
            print(f"not reported: {error}", file=sys.stderr)  # below a folder there may be other programs' files
    if parsed.json:
        found = [run.to_dict() for run in runs.values()]
        print(json.dumps(found if len(folders) > 1 else found[0], indent=2))
        return 0
    for folder, run in runs.items():
        output = folder / "report" if parsed.output is None else parsed.output / folder.relative_to(parsed.run_dir)
        print(f"report: {write_report(run, output)}")
        for missing in run.missing:
            print(f"not in the report: {missing}")
    return 0 if runs else 2
