"""A recipe started as a script in an environment without some library."""

import runpy
import sys


def run_script(script: str, library: str) -> int | str | None:
    """Run a module as `__main__` and return its exit status. For a process of its own."""
    assert library not in sys.modules
    sys.modules[library] = None  # type: ignore[assignment]  # neither imported nor found from now on
    sys.argv = [script]
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code
    return 0
