"""Tests of two processes under DDP: exact gradients, and joint decisions."""

from typing import Any

import pytest
from ranks import on_ranks
from training_rank import BAD, SPLITS

TOLERANCE = 1e-12  # fp64; sums over samples are taken in another order

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("training_rank:outcomes")


@pytest.mark.parametrize("split", SPLITS)
def test_gradient_and_loss_are_those_of_all_samples_with_one_exchange(results: Results, split: str) -> None:
    for rank in results:
        gradient_difference, loss_difference, num_exchanges = rank["splits"][split]
        assert gradient_difference <= TOLERANCE
        assert loss_difference <= TOLERANCE
        assert num_exchanges == 1


def test_a_rank_without_weight_takes_part_and_changes_nothing(results: Results) -> None:
    for gradient_difference, loss_difference in (rank["weightless"] for rank in results):
        assert gradient_difference <= TOLERANCE
        assert loss_difference <= TOLERANCE


def test_both_stop_before_the_update_when_one_has_a_bad_gradient(results: Results) -> None:
    first, second = (rank["non-finite"] for rank in results)
    assert first == second
    assert first["before"] == first["after"] != []
    header, finding = first["message"].splitlines()
    assert "NonFiniteGradientError: Non-finite gradient at step 2." in header
    assert finding.startswith("  rank 1, micro-batch 3: ")
    assert "first.weight" in finding


@pytest.mark.parametrize("case", BAD)
def test_both_stop_in_every_precision(results: Results, case: str) -> None:
    """Check that the error names rank and micro-batch; a loss scaler may skip steps until its scale is 1."""
    precision, _, bad_rank, micro_batch = BAD[case]
    first, second = (rank["non-finite in"][case] for rank in results)
    assert first == second
    *outcomes, unchanged = first
    assert unchanged
    if precision == "fp16":
        assert outcomes.pop(0) == "skipped"
    for message in outcomes:
        assert "NonFiniteGradientError: Non-finite gradient" in message
        assert f"rank {bad_rank}, micro-batch {micro_batch + 1}: " in message


def test_both_refuse_a_window_that_is_empty_on_one_rank(results: Results) -> None:
    first, second = (rank["nothing on one rank"] for rank in results)
    assert "invalid on another rank" in first
    assert "micro_batches is empty on this rank" in second


def test_out_of_memory_on_one_rank_halves_on_both_and_changes_nothing_else(results: Results) -> None:
    for first, second in zip(*(rank["out of memory"] for rank in results), strict=True):
        assert first[0] <= TOLERANCE
        assert second[0] <= TOLERANCE
        assert (first[1], second[1]) == ([1] * 7, [1] * 8)
        assert first[2] == second[2] == 1
        assert first[3] == second[3]
    assert len(results[0]["out of memory"]) == 8


def test_both_stop_when_one_sample_does_not_fit_on_one_rank(results: Results) -> None:
    first, second = (rank["does not fit on one rank"] for rank in results)
    assert first == "OutOfMemoryError: injected"
    assert "out of memory on another rank" in second


def test_parameters_that_one_rank_uses_get_their_gradient_on_both(results: Results) -> None:
    for difference, used in (rank["used on one rank"] for rank in results):
        assert difference <= TOLERANCE
        assert used == [True] * 6 + [False] * 2


def test_the_search_finds_what_fits_on_both(results: Results) -> None:
    assert [rank["search"] for rank in results] == [3, 3]


def test_a_cached_gradient_sees_the_samples_of_both(results: Results) -> None:
    first, second = (rank["gradient cache"] for rank in results)
    for rank in (first, second):
        assert rank["difference"] <= TOLERANCE
        assert rank["loss difference"] <= TOLERANCE
        assert rank["exchanges"] == 1
        assert "ValueError: models=None needs a prepared model" in rank["without models"]
    assert first["loss"] == second["loss"]
    assert first["draws"] == second["draws"]
    assert first["next draw"] != second["next draw"]  # each rank's own
