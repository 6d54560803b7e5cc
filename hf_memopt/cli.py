"""The `hf-memopt` command. Subcommands import what they need when they run, so that `--help` is quick."""

import argparse
import logging
import sys
from collections.abc import Sequence

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
    from hf_memopt.commands import estimate, machine, plan, smolvla

    parser = argparse.ArgumentParser(prog="hf-memopt", description="Train in the memory you have.")
    parser.add_argument("--version", action="version", version=f"hf_memopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for part in (smolvla, machine, estimate, plan):
        part.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
