"""Tests of two processes under DDP with a static graph, within `Join`, and with a rank whose data has ended."""

from typing import Any

import pytest
from ranks import on_ranks

TOLERANCE = 1e-12  # fp64; sums over samples are taken in another order

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("ddp_rank:outcomes")


def test_join_is_refused_on_both_until_it_is_off(results: Results) -> None:
    for rank in results:
        assert len(rank["join"]["errors"]) == 7
        for name, error in rank["join"]["errors"].items():
            assert "ValueError: model: torch's Join is on" in error, name
            assert "Join([model], enable=False)" in error
        assert rank["join"]["difference when off"] <= TOLERANCE


def test_a_rank_whose_data_has_ended_takes_part_and_changes_nothing(results: Results) -> None:
    for rank in results:
        assert len(rank["without data"]) == 5
        assert {name: found for name, found in rank["without data"].items() if not found <= TOLERANCE} == {}


def test_a_static_graph_is_refused_on_both_where_torch_would_fail(results: Results) -> None:
    for rank in results:
        errors = rank["refused static"]["errors"]
        after_backward = [errors.pop(name) for name in list(errors) if name.startswith(("MicroBatcher", "find"))]
        assert len(after_backward) == len(errors) - 1 == 3
        for error in after_backward:
            assert error.startswith("ValueError: static_graph=True")
            assert "train_step, on one micro-batch" in error
        for error in errors.values():
            assert error.startswith("ValueError: static_graph=True")
            assert "has 2 micro-batches" in error
            assert "GradientAccumulationPlugin(sync_each_batch=True)" in error
        assert rank["refused static"]["difference afterwards"] <= TOLERANCE


def test_steps_with_a_static_graph_are_exact_as_the_errors_say(results: Results) -> None:
    for rank in results:
        assert len(rank["static"]) == 5
        assert {name: found for name, found in rank["static"].items() if not found <= TOLERANCE} == {}


def test_micro_batcher_takes_unused_parameters_and_reentrant_checkpoints(results: Results) -> None:
    for rank in results:
        assert rank["reentrant"] <= TOLERANCE
