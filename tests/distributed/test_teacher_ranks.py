"""Tests that all processes of a machine keep one copy of the teacher in host memory."""

import os

import pytest
from ranks import on_ranks


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, which Linux has")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_hold_one_copy(num_ranks: int) -> None:
    seen = on_ranks("teacher_rank:outcomes", num_ranks=num_ranks)
    for mode in ("swap", "stream"):
        assert all(one[mode]["equal"] for one in seen)
        private_bytes = num_ranks * seen[0][mode]["weights_bytes"]
        assert private_bytes == num_ranks * 128 * 2**20
        # An unshared teacher would have a copy in each process.
        kept_bytes = private_bytes - sum(one[mode]["freed_bytes"] for one in seen)
        # A rank may hold a few huge pages of 2 MiB more or less.
        assert kept_bytes <= (1 / num_ranks + 0.05) * private_bytes
        assert all(one[mode]["files"] for one in seen)
    for one in seen:
        assert "differ between rank 0 and ranks [1]" in one["refusal"]
        assert one["named"] == []
