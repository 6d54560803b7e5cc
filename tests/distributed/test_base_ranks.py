"""Tests of a frozen base that streams in data-parallel training."""

from ranks import on_ranks


def test_gradients_are_those_of_the_resident_run() -> None:
    for seen in on_ranks("base_rank:outcomes"):
        assert seen["equal"] == {"host": True, "file": True}
        assert ["differ between rank 0 and ranks [1]" in refusal for refusal in seen["refusals"]] == [True, True]
