"""Tests that the first rank of a machine writes the weights, as tests/distributed does with two ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from teacher_toys import Network
from torch import distributed

from hf_memopt.weights.homes.home import several_ranks, share
from hf_memopt.weights.homes.packed_weights import PackedWeights


@pytest.fixture
def only_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_shared_memory_holds_what_was_packed(network: Network, only_rank: None) -> None:
    weights = PackedWeights(network)
    block = torch.zeros(weights.num_bytes, dtype=torch.uint8)
    weights.pack(block)
    assert torch.equal(share(weights, torch.device("cpu")), block)
    assert not several_ranks()
