"""Tests that two processes on the CPU log the memory of the process that holds most."""

from typing import Any

import pytest
from ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks("memory_rank:outcomes", str(tmp_path_factory.mktemp("ranks")))


def test_training_is_bitwise_unchanged_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert ranks[0]["plain"] == ranks[0]["watched"] == ranks[1]["watched"]


def test_the_largest_of_all_ranks_is_logged_on_each(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        logged = [entry for entry in rank["history"] if "loss" in entry]
        assert [entry["step"] for entry in logged] == [2, 4]
        assert [entry["memory/peak_allocated_gib"] for entry in logged] == [2.0, 2.0]
        assert [entry["memory/peak_rank"] for entry in logged] == [1, 1]
    assert ranks[0]["history"][0]["memory/host_rss_gib"] == ranks[1]["history"][0]["memory/host_rss_gib"]


def test_accelerate_logs_the_same_on_each_rank_whatever_its_phases(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["accelerate"] for rank in ranks)
    assert first == second
    assert first["memory/peak_allocated_gib"] == 2.0
    assert {"memory/only_on_rank_0_peak_gib", "memory/only_on_rank_1_peak_gib"} <= first.keys()
