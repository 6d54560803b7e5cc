"""`hf-memopt fit`: a training script in the memory that there is, without a setting."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_memopt.cli.launch_command import check_script, cut_at_script, flags_parser
from hf_memopt.command_line import Parser, number
from hf_memopt.process_trees import COMMAND
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.units import GIB, parse_size

_USAGE = "hf-memopt fit [FLAGS] -- SCRIPT [ARGUMENTS]"
_DESCRIPTION = """\
Run SCRIPT, or -m MODULE, so that its training fits in the memory that there is, with the same weights bit for
bit. Saved activations, frozen weights, weights that train, gradients and optimizer states leave as far as needed,
for host memory and, on a CPU or with --disk, for a disk. What fits is left alone."""
_EPILOG = """\
The script runs as with python SCRIPT, in one process. Should memory run out in the first steps, it is started
once more with all parts away. A table at the end says what was moved, and at which cost.

example: hf-memopt fit --memory 8GiB -- train.py --learning_rate 1e-4"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "fit",
        help="run a training script so that it fits in memory, with the same weights, without a setting",
        prefix_chars="\0",  # so that argparse leaves all words to the parser of flags and the script
        add_help=False,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _flags() -> Parser:
    parser = flags_parser("fit", _USAGE, _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="of the device; on a CPU of the process (default: what is free)")
    add("--host", metavar="SIZE", help="host memory for what leaves the device (default: what is free)")
    add("--disk", metavar="FOLDER", help="on a local disk (default: none, on a CPU the system's for temporary files)")
    add(
        "--max-slowdown",
        type=number(NOT_NEGATIVE),
        metavar="SHARE",
        help="stop where training waits for more than this share of its time (default: no limit)",
    )
    return parser


def _run(parsed: argparse.Namespace) -> int:
    flags, script = cut_at_script(parsed.words)
    options = _flags().parse_args([_dashed(word) for word in flags])
    check_script(script, _USAGE)
    if options.disk is not None and not Path(options.disk).is_dir():
        raise ValueError(f"disk={options.disk!r} is no folder; name one on a local disk with room to spare")
    settings = {
        "fit": True,
        "memory_gib": _gib(options.memory, "memory"),
        "host_budget_gib": _gib(options.host, "host"),
        "disk": options.disk,
        "max_waiting": options.max_slowdown,
    }
    text = ",".join(f"{name}={value}" for name, value in settings.items() if value is not None)
    command = [sys.executable, "-m", "hf_memopt.callbacks.every_trainer", *script]
    with tempfile.TemporaryDirectory(prefix="hf_memopt-") as folder:
        status = Path(folder, "status.json")
        environment = {**os.environ, "HF_MEMOPT": text, "HF_MEMOPT_FIT_STATUS": str(status), COMMAND: str(os.getpid())}
        code = subprocess.run(command, env=environment).returncode
        if _ran_out(code, status):
            print(
                "hf-memopt fit: memory ran out in the first steps; starting again with all parts away",
                file=sys.stderr,
                flush=True,
            )
            status.write_text("{}")
            code = subprocess.run(command, env=environment).returncode
            if code == -signal.SIGKILL:
                print(
                    "hf-memopt fit: training was killed with all parts away, too: it needs more memory", file=sys.stderr
                )
    return 128 - code if code < 0 else code


def _ran_out(code: int, status: Path) -> bool:
    """Return whether a run has ended for lack of memory in its first steps, which another run may repeat."""
    noted = json.loads(status.read_text()) if status.exists() else {}
    return code != 0 and not noted.get("is_settled") and (code == -signal.SIGKILL or noted.get("ran_out", False))


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _gib(text: str | None, option: str) -> float | None:
    return None if text is None else parse_size(text, option) / GIB
