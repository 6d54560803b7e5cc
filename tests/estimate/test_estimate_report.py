"""An estimate in words."""

import pytest
from estimate_runs import mlp_setup, step

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory, estimate_report
from hf_memopt.estimate.gpus import find_card


@pytest.fixture(scope="module")
def estimated() -> MemoryEstimate:
    return estimate_peak_memory(mlp_setup, step)


def test_a_peak_in_the_optimizer_is_said_to_be_out_of_reach_of_checkpointing(estimated: MemoryEstimate) -> None:
    assert estimated.phase == "optimizer"
    text = estimate_report.text(estimated)
    assert text.startswith("The peak is in the optimizer's update, in step 1: 0.00 GiB of tensors")
    assert "checkpointing and offloading cannot lower it" in text.splitlines()[1]


def test_an_estimate_prints_itself(estimated: MemoryEstimate) -> None:
    assert str(estimated) == estimate_report.text(estimated)
    assert len(repr(estimated)) < 5000  # without the trace of every allocation


def test_a_card_that_is_too_small(estimated: MemoryEstimate) -> None:
    needed = estimate_report.needed_bytes(estimated)
    assert needed == estimated.reserved_bytes + 640 * 2**20
    fits, tight = (find_card(f"{num_bytes}B") for num_bytes in (needed, needed - 1))
    assert "It fits on" in estimate_report.text(estimated, fits)
    assert "It does not fit on" in estimate_report.text(estimated, tight)
