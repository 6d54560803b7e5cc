"""Tests of two processes with a model sharded by FSDP2: exact gradients, and joint decisions."""

from typing import Any

import pytest
from late_imports import LateModule
from ranks import on_ranks

training_rank = LateModule("training_rank")

TOLERANCE = 1e-12  # fp64; sums over samples are taken in another order
FLOAT32_LOSS = 1e-6  # transformers computes the loss of language models in float32
NUM_SHARDED = 3  # two blocks, and the model around them

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("sharded_training_rank:outcomes")


@pytest.mark.parametrize("how", ["splits", "splits by hand", "splits, each batch"])
def test_gradient_loss_and_norm_are_those_of_all_samples(results: Results, how: str) -> None:
    """Check one exchange per sharded module, or one per micro-batch on request."""
    for rank in results:
        assert rank[how].keys() == training_rank.SPLITS.keys()
        for *differences, num_exchanges, num_micro_batches in rank[how].values():
            assert max(differences) <= TOLERANCE
            assert num_exchanges == NUM_SHARDED * (num_micro_batches if how == "splits, each batch" else 1)


def test_a_rank_with_fewer_micro_batches_repeats_its_last_one(results: Results) -> None:
    for rank in results:
        assert [rank["splits"][name][-1] for name in ("uneven", "tail on one rank")] == [3, 2]


def test_a_batch_on_each_rank_has_bitwise_the_gradient_of_one_process(results: Results) -> None:
    assert [rank["one batch each"] for rank in results] == [True, True]


def test_tokens_count_by_default(results: Results) -> None:
    """Compare sentences one by one on two ranks with all sentences at once."""
    for rank in results:
        assert max(rank["tokens"]) <= FLOAT32_LOSS


def test_clipping_is_by_the_norm_over_all_shards(results: Results) -> None:
    for gradient_difference, norm_difference, norm in (rank["clipped"] for rank in results):
        assert gradient_difference <= TOLERANCE
        assert norm_difference <= TOLERANCE
        assert norm == pytest.approx(0.1, rel=1e-5)


def test_both_stop_before_the_update_when_one_has_a_bad_gradient(results: Results) -> None:
    for first, second in zip(*(rank["non-finite"] for rank in results), strict=True):
        assert first == second
        assert first["before"] == first["after"] != []
        header, finding = first["message"].splitlines()
        assert "NonFiniteGradientError: Non-finite gradient at step 2." in header
        assert finding.startswith("  rank 1, micro-batch 3: 2.bias, 2.weight, 1.down.bias")
    assert len(results[0]["non-finite"]) == 4


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_step_after_an_error_is_what_it_would_have_been(results: Results, precision: str) -> None:
    assert [rank["after an error"][precision] for rank in results] == [[True, True]] * 2


def test_a_cached_gradient_sees_the_samples_of_both(results: Results) -> None:
    for rank in (each["gradient cache"] for each in results):
        assert rank["difference"] <= TOLERANCE
        assert rank["loss difference"] <= TOLERANCE
        assert rank["exchanges"] == NUM_SHARDED
        assert "ValueError: micro_batches: " in rank["unequal"]
        assert "2 to 3 on all; under FSDP2 and DeepSpeed give all ranks the same number" in rank["unequal"]


def test_a_micro_batcher_steps_as_train_step_and_cannot_go_back(results: Results) -> None:
    for rank in (each["micro-batcher"] for each in results):
        assert rank["equal"]
        (note,) = rank["notes"]
        assert "micro_batch_size=2 does not fit, and MicroBatcher cannot halve it under FSDP2 and DeepSpeed" in note
        assert "begin with 1" in note
        assert rank["size"] == 2
        assert "ValueError: find_micro_batch cannot go back under FSDP2 and DeepSpeed" in rank["search"]
