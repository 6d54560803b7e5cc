"""Tests that random programs with streamed weights equal the plain run, or raise an error that names the weight."""

from collections import Counter
from contextlib import nullcontext

import pytest
from streamed_programs import Part, Program, Step, draw
from streamed_runs import Run, results, shrunk

NUM_BLOCKS, NUM_EACH = 50, 60


@pytest.mark.sweep(share=2 / NUM_BLOCKS)
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_programs(block: int) -> None:
    programs = [draw(seed) for seed in range(block * NUM_EACH, (block + 1) * NUM_EACH)]
    failed = next((each for each in results(programs) if each[1].is_failure), None)
    assert failed is None, f"{shrunk(*failed)}\n{failed[1]} of\n{failed[0]}"


@pytest.mark.filterwarnings("ignore")  # torch's own, of old functions and of checkpoints without gradients
def test_most_programs_say_something() -> None:
    """Check that few programs are left out because plain torch raises or has no finite results."""
    counts: Counter[bool] = Counter()
    for seed in range(60):
        run = Run(draw(seed, without=["thread", "fails"]))
        run.go(lambda path: nullcontext())
        counts[run.error is None and all(bool(each.isfinite().all()) for each in run.seen.values())] += 1
    assert counts[True] > 0.8 * counts.total()


def test_a_program_prints_as_lines() -> None:
    program = Program(
        (Part("linear", after="relu_"), Part()), (Step(), Step(backward="twice", path="a")), "file", "0.5"
    )
    assert str(program) == (
        "seed 0: home file, budget 0.5\n"
        "  part 0: kind linear, after relu_\n"
        "  part 1: as by default\n"
        "  step 0: as by default\n"
        "  step 1: backward twice, path a"
    )
