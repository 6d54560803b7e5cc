from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.memory.leaks import detect


def unreached(levels: Iterator[int]) -> float:
    """Return the unreached bytes of a loop without a leak in Python, under an allocator that counts `levels`."""
    with patch.object(detect, "allocator_counter", lambda: lambda tensors: next(levels)):
        ages = detect.StorageAges(30, 8, 1024)
    for step in range(1, 47):
        ages.sample(step)
    return ages.unreached_bytes_per_step()


def test_growth_that_only_the_allocator_sees() -> None:
    noise = torch.randint(-300, 300, (100,)).tolist()
    assert unreached(iter(5000 * step + noise[step] for step in range(100))) == pytest.approx(5000, abs=300)


@given(st.lists(st.integers(0, 10**9), min_size=46, max_size=46))
@settings(max_examples=10, deadline=None)
def test_an_allocator_that_goes_up_and_down_is_no_leak(levels: list[int]) -> None:
    assert unreached(iter(levels)) == 0
