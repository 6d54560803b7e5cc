"""Tests that split_batch keeps every sample once and in order, in all kinds of containers."""

from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.training import split_batch

Pair = namedtuple("Pair", "first second")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25))
def test_parts_are_the_batch_in_its_order(num: int, size: int) -> None:
    x = torch.arange(num)
    batch = UserDict(x=x, nested=[Pair(x + 1, (x + 2,))], tasks=[f"task {i}" for i in range(num)], temperature=0.5)
    batch["scalar"], batch["nothing"] = torch.tensor(3), None
    parts = list(split_batch(batch, size))
    assert [len(part["x"]) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert all(isinstance(part, UserDict) and isinstance(part["nested"][0], Pair) for part in parts)
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["nested"][0].second[0] for part in parts]), x + 2)
    assert [task for part in parts for task in part["tasks"]] == batch["tasks"]
    assert all(part["temperature"] == 0.5 and part["scalar"] == 3 and part["nothing"] is None for part in parts)
    assert parts[0]["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with \[2, 3\] samples"):
        list(split_batch({"x": torch.zeros(2), "y": torch.zeros(3)}, 1))
    with pytest.raises(ValueError, match="without samples"):
        list(split_batch({"x": torch.tensor(1.0)}, 1))
