"""Progress of commands that take long, on a terminal."""

import sys


def show_progress(doing: str) -> None:
    """Write a line to standard error if a terminal shows it; a program that reads errors gets none."""
    if sys.stderr.isatty():
        print(f"{doing} ...", file=sys.stderr)
