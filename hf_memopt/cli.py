"""The `hf-memopt` command. Subcommands import what they need when they run, so that `--help` is quick."""

import importlib
import logging
import sys
from collections.abc import Sequence

from hf_memopt import __version__
from hf_memopt.command_line import TRACEBACK_FLAG, Parser, one_line_errors

# The subcommands, and the module in which they are.
_COMMANDS = {
    "smolvla_commands": ("prepare-student", "precompute", "evaluate", "export"),
    "machine_commands": ("doctor", "report"),
    "planning_commands": ("estimate", "plan"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; user errors go to standard error and give 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((argument for argument in given if argument != TRACEBACK_FLAG), "")
    return one_line_errors(f"hf-memopt {command}".rstrip(), _run, given)


def _run(arguments: list[str]) -> int:
    parsed = _parser(arguments[0] if arguments else "").parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # lerobot prints five tracebacks where FFmpeg is missing, and then reads video by other means.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    status: int = parsed.run(parsed)
    return status


def _parser(command: str = "") -> Parser:
    """Make the parser of one subcommand, or of all where it is none."""
    parser = Parser(
        prog="hf-memopt",
        description="Train in the memory you have.",
        epilog="A mistake is one line and exit status 2; with --traceback it is a Python traceback.",
    )
    parser.add_argument("--version", action="version", version=f"hf_memopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    modules = [module for module, names in _COMMANDS.items() if command in names] or list(_COMMANDS)
    for module in modules:
        importlib.import_module(f"hf_memopt.commands.{module}").add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
