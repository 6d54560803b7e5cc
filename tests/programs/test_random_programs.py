"""Tests that random autograd programs have the plain losses, gradients and errors in every mode."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from program_operations import Line
from program_runs import check, plain
from program_search import look
from program_strategy import Body, Pass, Program, programs

NUM_SLOW, NUM_EACH = 20, 100
_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
_TANH, _WRITE, _SCALE = Line("k", "tanh", ("x",)), Line("", "data.mul_", ("x",)), Line("p", "scale", ("k",))
_LINEAR = Line("a", "linear", ("x",), (0,))


_HALF_OVERWRITTEN = (
    _LINEAR,
    Line("c", "buffer", ("a",), ("left",)),
    Line("", "fill.data", ("c", "a"), ("right",)),
    Line("e", "part", ("c",), ("left",)),
    Line("f", "scale", ("e",)),
    Line("g", "part", ("c",), ("right",)),
    Line("k", "tanh", ("g",)),
    _SCALE,
    Line("", "fill.data", ("c", "f"), ("right",)),
)


def _program(*lines: Line, seed: int) -> Program:
    body = Body(lines, tuple(line.target for line in lines if line.operation in ("linear", "scale")))
    return Program((body,), (Pass(),) * 3, copier="early", seed=seed, is_known=False, frees=False)


# The examples write through `.data` to the source of a recomputed tensor before it is saved or copied.
@pytest.mark.e2e
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate, Phase.shrink], suppress_health_check=_CHECKS)
@example(_program(_TANH, _WRITE, _SCALE, seed=1))
@example(_program(_TANH, _WRITE, _LINEAR, _SCALE, seed=1))
@example(_program(*_HALF_OVERWRITTEN, seed=3))
@example(_program(*_HALF_OVERWRITTEN, Line("o", "linear", ("g",), (0,)), seed=0))
@given(programs())
def test_programs(program: Program) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_SLOW))
def test_more_programs(number: int) -> None:
    @seed(number)
    @settings(max_examples=NUM_EACH, derandomize=False, database=None, suppress_health_check=_CHECKS)
    @given(programs())
    def run(program: Program) -> None:
        check(program)

    run()


def test_most_programs_say_something() -> None:
    """Check that few programs are left out because plain torch reads overwritten bytes."""
    found = look(60, seed=0, check=lambda program: (torch.manual_seed(0), plain(program))[0] and None)
    assert found.num_tried < 3 * found.num_valid


def test_a_program_prints_as_lines() -> None:
    lines = (Line("a", "linear", ("x",), (0,)), Line("", "data.mul_", ("a",)), Line("b", "part", ("a",), ("left",)))
    program = Program((Body(lines, ("b",)),), (Pass(), Pass(rows=16, backward="twice")), "late", 3, True, False)
    assert str(program) == (
        "def body_0(x):\n"
        "    a = linear0(x)\n"
        "    a.data.mul_(0.5)\n"
        "    b = a[left]\n"
        "    return b.mean()\n"
        "body 0, R=8, backward after\n"
        "body 0, R=16, backward twice\n"
        "copier late, plan 3, model given"
    )
