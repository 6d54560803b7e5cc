"""Tests of activation offloading in two processes under FSDP2 and under tensor parallelism."""

from itertools import combinations
from typing import Any

import pytest
from ranks import on_ranks

CONDITIONS = ("lora", "checkpointing", "bf16", "unequal")
# Each mode with each condition, and each pair of conditions, at least once.
PAIRS = (
    "all+lora+bf16",
    "all+checkpointing+unequal",
    "inputs+lora+checkpointing+unequal",
    "inputs+checkpointing+bf16",
    "auto+lora+checkpointing+bf16",
    "auto+lora+unequal",
    "auto+bf16+unequal",
    "all+tensor_parallel",
    "auto+tensor_parallel",
    "inputs+tensor_parallel+checkpointing",
)
# "inputs" moves the inputs of checkpointed layers.
PRODUCT = [
    "+".join((mode, *chosen))
    for mode in ("all", "inputs", "auto")
    for num in range(len(CONDITIONS) + 1)
    for chosen in combinations(CONDITIONS, num)
    if mode != "inputs" or "checkpointing" in chosen
]


def check(ranks: list[dict[str, Any]], cases: tuple[str, ...] | list[str]) -> None:
    """Check bitwise gradients, moved bytes, and no host memory left."""
    for rank, results in enumerate(ranks):
        for case in cases:
            found = results[case]
            assert (found["equal"], found["learns"], found["live"]) == (True, True, 0), f"{case}, rank {rank}"
            assert found["moved"] > 0, f"{case}, rank {rank}"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks("sharded_offload_rank:outcomes", *PAIRS, "teachers")


def test_each_mode_under_each_pair_of_conditions(results: list[dict[str, Any]]) -> None:
    check(results, PAIRS)


def test_a_teacher_on_the_host_beside_a_sharded_student(results: list[dict[str, Any]]) -> None:
    """Check gradients bitwise, and the refusal of a sharded student as its own teacher."""
    for found in (rank["teachers"] for rank in results):
        assert (found["equal"], found["learns"]) == ({"swap": True, "stream": True}, True)
        assert "is sharded, and FSDP gathers weights" in found["refusal"]


def test_the_pairs_are_all_there() -> None:
    chosen = [set(case.split("+")) for case in PAIRS]
    wanted = list(combinations(CONDITIONS, 2))
    wanted += [(mode, each) for mode in ("all", "inputs", "auto") for each in CONDITIONS]
    assert [pair for pair in wanted if not any(set(pair) <= each for each in chosen)] == []


@pytest.mark.slow
def test_each_mode_under_all_conditions() -> None:
    check(on_ranks("sharded_offload_rank:outcomes", *PRODUCT), PRODUCT)
