"""Tests that all processes of a machine keep one copy of the teacher in host memory."""

import os
from typing import Any

import pytest
from ranks import on_ranks


def check(seen: list[dict[str, Any]]) -> None:
    num_ranks = len(seen)
    for mode in ("swap", "stream"):
        assert all(one[mode]["equal"] for one in seen)
        private_bytes = num_ranks * seen[0][mode]["weights_bytes"]
        assert private_bytes == num_ranks * 32 * 2**20
        # An unshared teacher would have a copy in each process.
        kept_bytes = private_bytes - sum(one[mode]["freed_bytes"] for one in seen)
        assert kept_bytes <= (1 / num_ranks + 0.05) * private_bytes
        assert all(one[mode]["files"] for one in seen)
    for one in seen:
        assert "differ between rank 0 and ranks [1]" in one["refusal"]
        assert one["named"] == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, which Linux has")
def test_two_processes_hold_one_copy() -> None:
    check(on_ranks("teacher_rank:outcomes"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, which Linux has")
def test_four_processes_hold_at_most_three_tenths_of_four_copies() -> None:
    check(on_ranks("teacher_rank:outcomes", num_ranks=4))
