"""Search for a program that fails, and shrink it."""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from program_runs import MODES, check
from program_strategy import Program, programs


@dataclass
class Search:
    """A search until the first failure: `first` as drawn, `program` shrunk. `num_tried` includes programs left out."""

    num_valid: int = 0
    num_tried: int = 0
    first: Program | None = None
    program: Program | None = None
    message: str = ""


def look(
    num_programs: int,
    seed: int,
    without: frozenset[str] = frozenset(),
    check: Callable[[Program], None] = check,
    shrinks: bool = True,
) -> Search:
    """Try up to `num_programs` programs, and stop at the first that fails."""
    found = Search()
    phases = [Phase.generate, *([Phase.shrink] if shrinks else [])]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_programs, database=None, phases=phases, deadline=None, derandomize=False,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(programs(without))
    def run(program: Program) -> None:
        found.num_tried += found.program is None
        try:
            check(program)
            found.num_valid += found.program is None
        except AssertionError as error:
            if found.program is None:
                found.first = program
            found.program, found.message = program, str(error).partition("\n")[0]
            raise

    try:
        run()
    except (AssertionError, hypothesis.errors.Flaky):
        assert found.program is not None
    return found


def check_in_child(program: Program, modes: Sequence[str] = MODES) -> None:
    """Check a program in a process of its own, and fail if the process dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, pickle.dumps(_result(program, modes)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert written, f"the process died of signal {os.WTERMSIG(status)}"
    kind, message = pickle.loads(written)
    hypothesis.assume(kind != "nothing said")
    assert kind == "right", message


def _result(program: Program, modes: Sequence[str]) -> tuple[str, Any]:
    try:
        check(program, modes)
    except hypothesis.errors.UnsatisfiedAssumption:
        return "nothing said", None
    except BaseException as error:
        return "wrong", f"{error}"[:1000]
    return "right", None
