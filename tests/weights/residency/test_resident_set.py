"""Tests of what stays on the device: against the least number of copies that is possible, and of memory's limits."""

import math
import random

import pytest
import torch
from torch import nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights.base import StreamedWeights
from hf_memopt.weights.residency.resident_set import ResidentSet, Visit, forecast
from hf_memopt.weights.residency.storages import Storage


def fewest_copies(visits: list[Visit], room: int) -> int:
    """Return how often storages of equal size must be brought if the one that is visited last makes room."""
    present: set[int] = set()
    copies = 0
    for place, (number,) in enumerate(visits):
        if number not in present:
            copies += 1
            if len(present) == room:
                present.remove(max(present, key=lambda each: next_visit(visits, place, each)))
            present.add(number)
    return copies


def next_visit(visits: list[Visit], place: int, number: int) -> float:
    return next((each for each in range(place, len(visits)) if visits[each] == (number,)), math.inf)


@pytest.mark.parametrize("room", [2, 3, 5, 8])
def test_no_choice_that_fetches_ahead_copies_less(room: int) -> None:
    chance = random.Random(room)
    for _ in range(40):
        alone = [(number,) for number in range(8)]
        visits = [alone[chance.randrange(8)] for _ in range(chance.randrange(1, 40))]
        peak, brought = forecast(visits, [1] * 8, room)
        # The room of one storage is for the next visit's.
        assert fewest_copies(visits, room) <= brought <= fewest_copies(visits, room - 1)
        assert peak <= room


@pytest.mark.parametrize("room", [0, 20, 60, math.inf])
def test_a_budget_is_kept_for_storages_of_any_size(room: float) -> None:
    chance = random.Random(0)
    for _ in range(40):
        sizes = [chance.randrange(1, 10) for _ in range(12)]
        modules = [tuple(chance.sample(range(12), chance.randrange(1, 4))) for _ in range(6)]
        visits = [modules[chance.randrange(6)] for _ in range(chance.randrange(1, 30))]
        largest = max(sum(sizes[number] for number in visit) for visit in visits)
        peak, brought = forecast(visits, sizes, room)
        assert peak <= max(2 * largest, room)
        assert brought >= sum(sizes[number] for number in {number for visit in visits for number in visit})
        if room == math.inf:
            assert brought == sum(sizes[number] for number in {number for visit in visits for number in visit})


def test_a_region_that_is_recomputed_and_differentiated_is_brought_once() -> None:
    sizes = [2, 1, 1, 2, 7, 7, 7] * 8 + [60]
    layers = [[(7 * layer + part,) for part in range(7)] for layer in range(8)]
    head = (len(sizes) - 1,)
    resident = ResidentSet([Storage(size) for size in sizes], 0, repeats=True)
    brought = []
    for _ in range(3):
        before, resident.peak_device_bytes = resident.bytes_brought, 0
        resident.begin("training", has_failed=False)
        resident.enter(head, "the model")  # in use throughout, as by a loss in tiles
        for visit in (each for layer in layers for each in layer):
            resident.enter(visit, visit)
            resident.leave(visit, visit)
        for layer in reversed(layers):
            for visit in (*layer, *reversed(layer)):
                resident.enter(visit, visit)
                resident.leave(visit, visit)
        resident.leave(head, "the model")
        resident.end()
        brought.append(resident.bytes_brought - before)
    forward, backward = sum(sizes[:-1]), sum(sizes[:-1])
    assert brought[-1] <= 60 + forward + backward
    assert resident.peak_device_bytes <= 2 * 60


def test_passes_that_repeat_keep_what_comes_first() -> None:
    storages = [Storage(1) for _ in range(6)]
    visits = [(number,) for number in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)]
    resident = ResidentSet(storages, 4, repeats=True)
    brought = []
    for _ in range(4):
        before = resident.bytes_brought
        resident.begin("training", has_failed=False)
        for visit in visits:
            resident.enter(visit, visit)
            resident.leave(visit, visit)
        resident.end()
        brought.append(resident.bytes_brought - before)
        assert {number for number, each in enumerate(storages) if each.has_memory} == (
            {0, 1, 2, 3} if len(brought) > 1 else set()
        )
    # Four are kept from step to step, and at the turn.
    assert brought == [12, 8, 4, 4]
    assert resident.peak_device_bytes == 4


def test_the_last_layers_are_kept_at_the_turn_of_a_step() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False).requires_grad_(False) for _ in range(4)))
    streamed = StreamedWeights(model, home="host", copier=SyncCopier())
    x = torch.ones(2, 16, requires_grad=True)
    brought = []
    for _ in range(3):
        before = streamed.report().bytes_to_device
        with streamed.stream():
            loss = model(x).sum()
        loss.backward()
        brought.append(streamed.report().bytes_to_device - before)
    # Two layers have room.
    assert brought == [8 * 1024, 6 * 1024, 6 * 1024]
    assert streamed.report().peak_device_bytes == 2 * 1024
