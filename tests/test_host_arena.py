"""Host memory for offloaded tensors does not grow with the number of sizes, and settles where steps repeat."""

import random

import pytest
import torch

from hf_memopt import SyncCopier
from hf_memopt.transfer.host_arena import HostArena

NUM_TENSORS, LARGEST = 10, 1 << 16


def step(arena: HostArena, sizes: list[int]) -> None:
    """All are held at once, each with bytes of its own."""
    held = [arena.acquire(size) for size in sizes]
    for value, (memory, size) in enumerate(zip(held, sizes, strict=True)):
        assert memory is not None
        assert size <= memory.nbytes <= 2 * size
        memory.fill_(value)
    for value, memory in enumerate(held):
        assert memory is not None
        assert torch.equal(memory, torch.full_like(memory, value))
        arena.release(memory)


@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_steps_of_ever_other_sizes_use_the_same_blocks(order: str) -> None:
    arena, lots = HostArena(SyncCopier()), random.Random(0)
    sizes = {
        "random": [lots.randint(1, LARGEST) for _ in range(1000)],
        "rising": range(LARGEST // 1000, LARGEST, LARGEST // 1000),
        "falling": range(LARGEST, LARGEST // 1000, -LARGEST // 1000),
    }
    for size in sizes[order]:
        step(arena, [size] * NUM_TENSORS)
    assert arena.bytes_live == 0
    assert arena.bytes_held <= 2 * NUM_TENSORS * LARGEST


def test_sizes_that_come_back_need_no_more_memory() -> None:
    arena, lots = HostArena(SyncCopier()), random.Random(0)
    steps = [[lots.randint(1, LARGEST) for _ in range(NUM_TENSORS)] for _ in range(20)]
    for _ in range(20):
        for sizes in steps:
            step(arena, sizes)
    before = arena.num_allocations
    for sizes in steps:
        step(arena, sizes)
    assert arena.num_allocations == before


def test_two_kinds_of_steps_keep_the_blocks_of_both() -> None:
    """Where one's are far too large for the other."""
    arena = HostArena(SyncCopier())
    for _ in range(3):
        step(arena, [10] * 4)
        step(arena, [100] * 4)
    assert arena.num_allocations == 8
    assert arena.bytes_held == 440


def test_a_block_that_is_larger_than_what_it_holds_comes_back_whole() -> None:
    arena = HostArena(SyncCopier())
    step(arena, [100])
    step(arena, [60])
    step(arena, [100])
    assert (arena.num_allocations, arena.bytes_held) == (1, 100)


def test_a_repeated_step_takes_exactly_what_it_needs() -> None:
    arena = HostArena(SyncCopier())
    for _ in range(5):
        step(arena, [100, 99, 50, 51, 100])
    assert (arena.num_allocations, arena.bytes_held) == (5, 400)
