"""CUDA's caching allocator, with cases computed by hand from its rules."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.planning.accounting.caching_allocator import CachingAllocator, MemoryTrace, OutOfDeviceMemoryError
from hf_memopt.units import KIB, MIB


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # A rest of at most 1 MiB is not split off.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
    ],
)
def test_rounding_and_the_sizes_of_segments(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_blocks_share_a_segment_and_large_ones_do_not_use_it() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 4 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 24 * MIB


def test_a_freed_segment_is_kept_and_used_again() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 30 * MIB)
    allocator.allocate(29 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (30 * MIB, 30 * MIB)


def test_a_segment_serves_the_stream_that_asked_for_it() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB
    trace = MemoryTrace((0, 0, 1), (30 * MIB, -30 * MIB, 30 * MIB), ("",) * 3, (0, 1, 2), 0, streams={0: 1})
    assert trace.replay().peak_reserved_bytes == 60 * MIB
    # On a full device, the unused segment is released.
    assert trace.fits(30 * MIB)


def test_large_blocks_are_split_when_more_than_a_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(28 * MIB)
    assert allocator.allocated_bytes == 28 * MIB
    allocator.allocate(2 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (30 * MIB, 30 * MIB)


def test_the_best_fitting_block_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(18 * MIB).address == blocks[1].address
    assert allocator.allocate(22 * MIB).address == blocks[2].address


def test_free_neighbours_join() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB))
    first, second, third = (allocator.allocate(size * MIB) for size in (8, 6, 6))
    assert allocator.reserved_bytes == 20 * MIB
    allocator.release(first)
    allocator.release(third)
    allocator.release(second)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_with_a_tensor_between_them_do_not_join() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB))
    first, _, third = (allocator.allocate(size * MIB) for size in (8, 4, 8))
    allocator.release(first)
    allocator.release(third)
    allocator.allocate(16 * MIB)
    assert allocator.reserved_bytes == 36 * MIB


def test_a_full_device_gets_unused_segments_back() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.peak_reserved_bytes == 40 * MIB


def test_a_segment_with_one_tensor_left_is_not_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(2 * MIB)
    with pytest.raises(OutOfDeviceMemoryError, match=f"no room for {40 * MIB} bytes: {30 * MIB} of {50 * MIB}"):
        allocator.allocate(40 * MIB)


def trace(storages: tuple[int, ...], changes: tuple[int, ...], first_step: int = 0) -> MemoryTrace:
    return MemoryTrace(storages, changes, ("forward",) * len(changes), tuple(range(len(changes))), first_step)


def test_a_log_is_replayed() -> None:
    # Storage 0 grows from 12 to 30 MiB, as a resized storage does, and dies; storage 1 then fits into its segment.
    storages = (0, 0, 0, 1)
    changes = (12 * MIB, 18 * MIB, -30 * MIB, 28 * MIB)
    replay = trace(storages, changes).replay()
    assert replay == ([12 * MIB, 30 * MIB, 0, 28 * MIB], 42 * MIB)
    with pytest.raises(OutOfDeviceMemoryError):
        trace(storages, changes).replay(29 * MIB)


def test_the_peak_is_that_of_blocks_from_the_first_step_on() -> None:
    changes = (30 * MIB, -30 * MIB, 29 * MIB + 512)
    assert trace((0, 0, 1), changes).peak() == (30 * MIB, 0)
    # The rest of the block is too small to be split off, so that it stays allocated.
    assert trace((0, 0, 1), changes, first_step=2).peak() == (30 * MIB, 2)
    assert trace((0, 0, 1), changes, first_step=2).peaks_by_phase() == {"forward": 30 * MIB}


def test_on_a_cpu_the_peak_is_that_of_bytes() -> None:
    replaced = replace(trace((0, 0, 1), (30 * MIB, -30 * MIB, 29 * MIB + 1), first_step=2), in_blocks=False)
    assert replaced.peak() == (29 * MIB + 1, 2)


def test_the_smallest_capacity_is_the_least_on_which_the_run_goes_through() -> None:
    # With room to spare the second block gets its own segment; on a full device it replaces the first.
    run = trace((0, 0, 1), (30 * MIB, -30 * MIB, 40 * MIB))
    assert run.unlimited.peak_reserved_bytes == 70 * MIB
    assert 40 * MIB <= run.smallest_capacity < 42 * MIB
    assert run.fits(run.smallest_capacity)
    assert not run.fits(40 * MIB - 1)


SIZES = st.one_of(st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(12 * MIB, 90 * MIB))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 10**6)), max_size=60), st.sampled_from([None, 256 * MIB]))
def test_blocks_never_overlap_and_the_books_balance(moves: list[tuple[int, int]], capacity: int | None) -> None:
    """Allocate at each move, and release a live block if the move's number selects one."""
    allocator, live = CachingAllocator(capacity), []
    for num_bytes, number in moves:
        try:
            live.append(allocator.allocate(num_bytes))
        except OutOfDeviceMemoryError:
            assert capacity is not None
        if live and number % 2:
            allocator.release(live.pop(number % len(live)))
        spans = sorted((block.address, block.address + block.num_bytes) for block in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.num_bytes for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= (capacity or allocator.reserved_bytes)
    for block in live:
        allocator.release(block)
    assert allocator.allocated_bytes == 0
    # All blocks have joined to whole segments, which a full device would release.
    if capacity:
        allocator.allocate(capacity)
        assert allocator.reserved_bytes == capacity
