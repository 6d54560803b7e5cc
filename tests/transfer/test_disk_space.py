"""Tests that extents of a file never overlap, that space is used again, and that the budget holds."""

import gc
import random
from collections.abc import Callable

import pytest

from hf_memopt.transfer.disk_space import DiskSpace, Extent

PAGE = 4096


class Disk:
    """A stand-in for a file: its length, `lengths` it was given, and `while_resizing`, called in the middle."""

    def __init__(self, room_bytes: int | None = None) -> None:
        self.lengths: list[int] = [0]
        self._room_bytes = room_bytes
        self.while_resizing: Callable[[], object] | None = None

    def resize(self, num_bytes: int) -> None:
        if self._room_bytes is not None and num_bytes > self._room_bytes:
            raise OSError("no space left")
        if self.while_resizing is not None:
            self.while_resizing()
        self.lengths.append(num_bytes)


class Model:
    """A space beside the list of the extents that are in use."""

    def __init__(self, budget_bytes: int | None = None, room_bytes: int | None = None) -> None:
        self.disk = Disk(room_bytes)
        self.space = DiskSpace(PAGE, self.disk.resize, budget_bytes)
        self.live: list[Extent] = []

    def acquire(self, num_bytes: int) -> Extent | None:
        extent = self.space.acquire(num_bytes)
        if extent is not None:
            self.live.append(extent)
        self.check()
        return extent

    def release(self, extent: Extent) -> None:
        self.live.remove(extent)
        self.space.release(extent)
        self.check()

    def trim(self) -> None:
        self.space.trim()
        self.check()

    def check(self) -> None:
        end = 0
        for start, num_bytes, nbytes in sorted(self.live):
            assert start >= end
            assert start % PAGE == num_bytes % PAGE == 0
            assert num_bytes >= nbytes + PAGE - 1  # wherever in the first page the bytes begin
            end = start + num_bytes
        assert end <= self.space.bytes_held == self.disk.lengths[-1]
        assert self.space.bytes_live == sum(extent.num_bytes for extent in self.live)
        budget = self.space.budget_bytes
        assert budget is None or self.space.bytes_held <= budget


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget_pages", [None, 100])
def test_no_two_extents_overlap(seed: int, budget_pages: int | None) -> None:
    dice, model = random.Random(seed), Model(None if budget_pages is None else PAGE * budget_pages)
    largest_bytes = num_refused = 0
    for _ in range(1500):
        choice = dice.random()
        if choice < 0.5 and len(model.live) < 40:
            wanted = dice.choice([0, 1, PAGE, PAGE + 1, dice.randrange(30 * PAGE)])
            extent = model.acquire(wanted)
            num_refused += extent is None
            assert extent is None or extent.nbytes == wanted
        elif choice < 0.98 and model.live:
            model.release(dice.choice(model.live))
        elif choice >= 0.98:
            model.trim()
        largest_bytes = max(largest_bytes, model.space.bytes_live)
    assert (num_refused > 0) == (budget_pages is not None)
    assert max(model.disk.lengths) <= 2.5 * largest_bytes
    for extent in list(model.live):
        model.release(extent)
    model.trim()
    model.trim()
    assert model.space.bytes_held == 0


def test_a_step_that_repeats_takes_nothing_more() -> None:
    model, sizes = Model(), [PAGE * pages + 1 for pages in (1, 7, 3, 20, 3)]
    lengths = []
    for _ in range(3000):
        for extent in [model.acquire(size) for size in sizes]:
            assert extent is not None
            model.release(extent)
        lengths.append(model.disk.lengths[-1])
    assert len(set(lengths)) == 1
    assert model.space.num_allocations == len(sizes)


def test_steps_of_random_sizes_hold_their_space() -> None:
    dice, model = random.Random(0), Model()
    needs = []
    for _ in range(3000):
        extents = [model.acquire(dice.randrange(1, 20 * PAGE)) for _ in range(8)]
        needs.append(model.space.bytes_live)
        dice.shuffle(extents)
        for extent in extents:
            model.release(extent)
    assert model.space.bytes_held <= 1.1 * max(needs)


def test_the_smallest_extent_that_is_large_enough_is_taken() -> None:
    model = Model()
    large, _, small, _ = (model.acquire(PAGE * pages) for pages in (8, 1, 3, 1))
    model.release(large)
    model.release(small)
    again = model.acquire(2 * PAGE)
    assert again.start == small.start
    assert model.acquire(4 * PAGE).start == large.start


def test_neighbours_become_one_extent() -> None:
    model = Model()
    extents = [model.acquire(PAGE) for _ in range(6)]
    for index in (1, 3, 2):  # the last one joins both sides
        model.release(extents[index])
    whole = model.acquire(5 * PAGE)
    assert (whole.start, whole.num_bytes) == (extents[1].start, 6 * PAGE)


def test_the_free_end_is_given_back_after_two_trims_without_need() -> None:
    model = Model()
    extents = [model.acquire(10 * PAGE) for _ in range(4)]
    for extent in extents[1:]:
        model.release(extent)
    held = model.space.bytes_held
    model.trim()
    assert model.space.bytes_held == held  # it was needed since the last call
    model.trim()
    assert held > model.space.bytes_held >= 1.5 * extents[0].num_bytes
    model.release(extents[0])
    model.trim()
    model.trim()
    assert model.space.bytes_held == 0


def test_nothing_has_changed_where_the_disk_is_full() -> None:
    model = Model(room_bytes=20 * PAGE)
    first = model.acquire(9 * PAGE)
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            model.acquire(15 * PAGE)
        model.check()
    assert model.acquire(5 * PAGE) is not None
    model.release(first)
    assert model.acquire(9 * PAGE).start == first.start


def test_a_budget_refuses_and_goes_on() -> None:
    model = Model(budget_bytes=4 * PAGE)
    assert model.acquire(4 * PAGE) is None  # which may begin anywhere in a page
    first = model.acquire(3 * PAGE)
    assert model.acquire(1) is None
    model.release(first)
    assert model.acquire(1) is not None


class Graph:
    """Holds an extent, which its destructor gives back, and is garbage only for the collector."""

    def __init__(self, model: Model, num_bytes: int) -> None:
        extent = model.space.acquire(num_bytes)
        assert extent is not None
        self._model, self._extent, self._self = model, extent, self
        model.live.append(extent)

    def __del__(self) -> None:
        self._model.live.remove(self._extent)
        self._model.space.release(self._extent)


def test_destructors_release_in_the_middle_of_a_method() -> None:
    """Let the file's change of length run the collector, so that extents come back while others are cut."""
    dice, model = random.Random(0), Model()
    for _ in range(200):
        Graph(model, dice.randrange(10 * PAGE))
        model.disk.while_resizing = gc.collect
        extent = model.acquire(dice.randrange(40 * PAGE))
        model.disk.while_resizing = None
        model.release(extent)
        if dice.random() < 0.1:
            Graph(model, dice.randrange(10 * PAGE))
            model.disk.while_resizing = gc.collect
            model.trim()
            model.disk.while_resizing = None
    gc.collect()
    model.check()
    assert model.live == []
    model.trim()
    model.trim()
    assert model.space.bytes_held == 0  # no space was lost
