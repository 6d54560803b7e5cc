"""Tests of the figures of a memory below the device."""

import pytest

from hf_memopt.transfer.tier import Tier


@pytest.mark.parametrize(
    ("write", "read", "which"), [(0.0, 1.0, "write"), (1.0, -1.0, "read"), (float("nan"), 1.0, "write")]
)
def test_a_tier_has_a_bandwidth_each_way(write: float, read: float, which: str) -> None:
    with pytest.raises(ValueError, match=f"{which}_bytes_per_s of the disk"):
        Tier("disk", write, read)


def test_a_slower_tier_is_the_same_otherwise() -> None:
    tier = Tier("disk", 100.0, 50.0, budget_bytes=7, is_pinned=True, wears=True)
    assert tier.slower(0.5) == Tier("disk", 50.0, 25.0, budget_bytes=7, is_pinned=True, wears=True)
    assert tier == Tier("disk", 100.0, 50.0, budget_bytes=7, is_pinned=True, wears=True)
