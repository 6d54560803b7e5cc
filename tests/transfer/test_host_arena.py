"""Tests that the host memory of offloaded tensors stays near the largest need, and settles when needs stop growing."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_memopt import SyncCopier
from hf_memopt.transfer.host_arena import HostArena

KIB = 1024
NUM_TENSORS = 21
# Relative sizes of the tensors that a transformer's layers save for each token.
SHARES = (1, 1, 4, 2, 1, 3, 1, 4, 4)


def tokens_of_padded_batches(dice: random.Random) -> int:
    return dice.randint(1, 5) * dice.randint(4, 63)


def tokens_up_to_a_length(dice: random.Random) -> int:
    return dice.randint(1, 300)


def mostly_short_texts(dice: random.Random) -> int:
    return min(round(dice.lognormvariate(4, 1)) + 1, 300)


def sizes_of_step(num_tokens: int) -> list[int]:
    """Return sizes in bytes, some of which depend on the batch."""
    return [64 * num_tokens * share for share in SHARES * 2] + [7 * KIB] * 3


def in_order(arena: HostArena, sizes: list[int], dice: random.Random) -> int:
    return hold_all(arena, sizes, lambda held: held.reverse())


def released_in_any_order(arena: HostArena, sizes: list[int], dice: random.Random) -> int:
    dice.shuffle(sizes)
    return hold_all(arena, sizes, dice.shuffle)


def hold_all(arena: HostArena, sizes: list[int], order: Callable[[list[Tensor]], None]) -> int:
    """Acquire blocks of all sizes, then release them in an order, and return the bytes held at once."""
    held = [block for block in map(arena.acquire, sizes) if block is not None]
    order(held)
    for block in held:
        arena.release(block)
    return sum(sizes)


def some_released_at_once(arena: HostArena, sizes: list[int], dice: random.Random) -> int:
    held: list[Tensor] = []
    most = 0
    for number, size in enumerate(sizes):
        block = arena.acquire(size)
        assert block is not None
        held.append(block)
        most = max(most, arena.bytes_live)
        if number % 5 == 4:
            arena.release(held.pop(dice.randrange(len(held))))
    for block in held:
        arena.release(block)
    return most


@pytest.mark.parametrize("step", [in_order, released_in_any_order, some_released_at_once])
@pytest.mark.parametrize("num_tokens", [tokens_of_padded_batches, tokens_up_to_a_length, mostly_short_texts])
@pytest.mark.sweep(share=0.1)
def test_3000_steps_of_ever_other_sizes(
    step: Callable[[HostArena, list[int], random.Random], int], num_tokens: Callable[[random.Random], int]
) -> None:
    """Check for at most 1.5 times the largest step's need, and no allocation in the last thousand steps."""
    arena, dice = HostArena(SyncCopier()), random.Random(0)
    largest = num_allocations = 0
    for number in range(3000):
        if number == 2000:
            num_allocations = arena.num_allocations
        largest = max(largest, step(arena, sizes_of_step(num_tokens(dice)), dice))
        assert arena.bytes_held <= 1.5 * largest
    assert arena.bytes_live == 0
    assert arena.num_allocations == num_allocations


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.sweep(share=0.3)
def test_at_its_limit_it_allocates_no_more_than_below_it(share: float) -> None:
    largest = sum(sizes_of_step(5 * 63))
    arena, dice = HostArena(SyncCopier(), budget_bytes=round(share * largest)), random.Random(0)
    for number in range(1000):
        if number == 500:
            num_allocations = arena.num_allocations
        in_order(arena, sizes_of_step(tokens_of_padded_batches(dice)), dice)
        assert arena.bytes_held <= share * largest
    assert arena.num_allocations == num_allocations < 4 * NUM_TENSORS


def test_a_repeated_step_takes_exactly_what_it_needs() -> None:
    arena, sizes = HostArena(SyncCopier()), [KIB * size for size in (100, 99, 50, 51, 100)]
    for _ in range(5):
        in_order(arena, sizes, random.Random(0))
    assert (arena.num_allocations, arena.bytes_held) == (5, 400 * KIB)


def test_a_smaller_step_in_between_changes_nothing() -> None:
    arena = HostArena(SyncCopier())
    for size in (100, 60, 100):
        in_order(arena, [KIB * size] * 4, random.Random(0))
    assert (arena.num_allocations, arena.bytes_held) == (4, 400 * KIB)


@pytest.mark.parametrize("seed", range(5))
def test_no_two_blocks_share_a_byte(seed: int) -> None:
    arena, dice = HostArena(SyncCopier(), budget_bytes=40_000), random.Random(seed)
    held: list[tuple[Tensor, int]] = []
    for number in range(2000):
        if held and dice.random() < 0.5:
            block, value = held.pop(dice.randrange(len(held)))
            assert torch.equal(block, torch.full_like(block, value))
            arena.release(block)
        elif (block := arena.acquire(dice.choice([1, 63, 64, 65, 1000, dice.randint(1, 5000)]))) is not None:
            assert block.data_ptr() % 64 == 0
            held.append((block.fill_(number % 256), number % 256))
        assert arena.bytes_live == sum(block.nbytes for block, _ in held) <= arena.bytes_held <= 40_000
        if number % 100 == 0:
            arena.trim()


def test_free_regions_give_way_to_one_that_is_large_enough() -> None:
    arena = HostArena(SyncCopier(), budget_bytes=100 * KIB)
    first = arena.acquire(60 * KIB)
    assert first is not None
    assert arena.acquire(60 * KIB) is None
    arena.release(first)
    assert arena.acquire(80 * KIB) is not None
    assert (arena.bytes_live, arena.num_allocations) == (80 * KIB, 2)
    assert 80 * KIB <= arena.bytes_held <= 100 * KIB


def test_what_is_not_needed_any_more_is_given_back() -> None:
    arena = HostArena(SyncCopier())
    in_order(arena, [10 * KIB] * 100, random.Random(0))
    arena.trim()
    for _ in range(2):
        in_order(arena, [10 * KIB] * 70, random.Random(0))
    arena.trim()
    assert arena.bytes_held == 1000 * KIB  # not 1.5 times the need
    for _ in range(2):
        in_order(arena, [10 * KIB] * 60, random.Random(0))
    arena.trim()
    assert arena.bytes_held == 600 * KIB
    in_order(arena, [10 * KIB] * 60, random.Random(0))
    assert arena.num_allocations == 100  # no block in use went
    arena.trim()
    in_order(arena, [KIB], random.Random(0))
    arena.trim()
    assert arena.bytes_held == 0  # the remaining block was ten times too large


def test_one_large_region_is_given_back_too() -> None:
    arena = HostArena(SyncCopier())
    for size in (10, 200):
        in_order(arena, [size * KIB], random.Random(0))
    arena.trim()
    in_order(arena, [10 * KIB], random.Random(0))
    arena.trim()
    assert arena.bytes_held == 0


def test_what_is_in_use_stays_when_the_rest_is_given_back() -> None:
    arena = HostArena(SyncCopier())
    block = arena.acquire(10 * KIB)
    assert block is not None
    block.fill_(7)
    in_order(arena, [100 * KIB] * 3, random.Random(0))
    arena.trim()
    arena.trim()
    assert (arena.bytes_held, arena.bytes_live) == (10 * KIB, 10 * KIB)
    assert torch.equal(block, torch.full_like(block, 7))


def test_what_arenas_hold_is_counted_together() -> None:
    """Check that the bytes of a deleted arena are subtracted, and its allocations are not."""
    before = HostArena.of_process()
    first, second = HostArena(SyncCopier()), HostArena(SyncCopier())
    held = [first.acquire(10 * KIB), second.acquire(20 * KIB)]
    during = HostArena.of_process()
    assert during.num_bytes - before.num_bytes == 30 * KIB
    del held, first
    after = HostArena.of_process()
    assert during.num_bytes - after.num_bytes == 10 * KIB
    assert after.num_allocations == during.num_allocations == before.num_allocations + 2


def test_a_destructor_may_release_while_a_block_is_being_made() -> None:
    """Release a block during an allocation, as a garbage collection might."""

    class Meddling(SyncCopier):
        def empty_host(self, num_bytes: int) -> Tensor:
            while held:
                arena.release(held.pop())
            return super().empty_host(num_bytes)

    held: list[Tensor] = []
    arena = HostArena(Meddling())
    for size in (1, 2, 3, 4):
        blocks = [arena.acquire(size * KIB) for _ in range(3)]
        held += [block for block in blocks if block is not None]
    assert arena.acquire(4 * KIB) is not None
    assert arena.bytes_live == 4 * KIB + sum(block.nbytes for block in held)


class Slab(SyncCopier):
    """A copier that cuts all host memory out of one storage, piece after piece."""

    def __init__(self) -> None:
        super().__init__()
        self._slab, self._taken = torch.zeros(2**20, dtype=torch.uint8), 0

    def empty_host(self, num_bytes: int) -> Tensor:
        piece = self._slab[self._taken : self._taken + num_bytes]
        self._taken += num_bytes
        return piece


def test_regions_may_be_pieces_of_one_storage() -> None:
    arena = HostArena(Slab())
    blocks = [arena.acquire(size) for size in (64, 128, 192)]
    for value, block in enumerate(blocks):
        assert block is not None
        block.fill_(value)
    assert [set(block.tolist()) for block in blocks if block is not None] == [{0}, {1}, {2}]
    for block in blocks:
        assert block is not None
        arena.release(block)
    again = [arena.acquire(64) for _ in range(6)]
    assert len({block.data_ptr() for block in again if block is not None}) == 6
    assert arena.bytes_held == 64 + 128 + 192
