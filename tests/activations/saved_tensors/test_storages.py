"""Tests that kept storages stay, and that offloaded storages come back with the same bytes."""

from collections.abc import Callable

import pytest
import torch
from device_states import above_host
from torch import Tensor

from hf_memopt.activations.saved_tensors.device_state import DeviceState, Prefetcher
from hf_memopt.activations.saved_tensors.storages import KeptStorage, OffloadedStorage, traced_range
from hf_memopt.autograd_state import bytes_of
from hf_memopt.transfer.lower_memory import Place

NUM_BYTES = 256


@pytest.fixture
def context() -> DeviceState:
    return above_host()


@pytest.fixture
def tensor() -> Tensor:
    return torch.randn(NUM_BYTES // 4, generator=torch.Generator().manual_seed(0))


class Uses(Prefetcher):
    """A prefetcher that counts uses of storages, and prefetches none."""

    def __init__(self) -> None:
        self.num_uses = 0

    def begin_use(self, index: int) -> None:
        self.num_uses += 1


def place_for(tensor: Tensor, context: DeviceState) -> Place:
    storage = tensor.untyped_storage()
    place = context.acquire(storage.nbytes(), storage)
    assert place is not None
    return place


class Offloading:
    def __init__(self, context: DeviceState, tensor: Tensor) -> None:
        self._uses = Uses()
        self.storage = OffloadedStorage(tensor, context, 0, place_for(tensor, context), self._uses)

    @property
    def num_uses(self) -> int:
        return self._uses.num_uses


def in_backward(action: Callable[[], None]) -> None:
    """Run an action in a node of a backward that frees its graph."""
    done = []

    def hook(gradient: Tensor) -> None:
        action()
        done.append(True)

    y = torch.ones(2, requires_grad=True).exp()
    y.register_hook(hook)
    y.sum().backward()
    assert done == [True]


def test_what_is_kept_is_the_same_memory_until_it_dies(context: DeviceState, tensor: Tensor) -> None:
    storage = KeptStorage(tensor[8:], context, 3)
    assert storage.is_kept
    assert (storage.index, storage.num_bytes) == (3, NUM_BYTES)  # the whole storage, not the view
    assert storage.fetch(0, True).data_ptr() == tensor.data_ptr()
    assert storage.fetch(0, True).nbytes == NUM_BYTES
    assert context.held.now_bytes == NUM_BYTES
    key = storage.key
    assert context.storages[key]() is storage
    del storage
    assert context.held.now_bytes == 0
    assert key not in context.storages


def test_what_is_offloaded_leaves_and_comes_back_with_the_same_bytes(context: DeviceState, tensor: Tensor) -> None:
    offloading = Offloading(context, tensor)
    storage, want = offloading.storage, bytes_of(tensor).clone()
    assert not storage.is_kept
    assert (storage.is_away, context.held.now_bytes) == (False, NUM_BYTES)
    storage.let_go()
    assert (storage.is_away, context.held.now_bytes) == (True, 0)
    tensor.data.zero_()  # the original's memory may be overwritten

    def read() -> None:
        assert torch.equal(storage.fetch(1, True), want)
        assert (storage.is_away, context.held.now_bytes) == (False, NUM_BYTES)

    in_backward(read)
    assert offloading.num_uses == 1
    storage.end_backward(2)  # a backward that has not read the storage
    assert not storage.is_away
    storage.end_backward(1)
    context.held.settle()
    assert (storage.is_away, context.held.now_bytes) == (True, 0)
    in_backward(read)


def test_where_the_graph_is_retained_the_last_reader_of_a_backward_gives_the_bytes_up(
    context: DeviceState, tensor: Tensor
) -> None:
    storage = Offloading(context, tensor).storage
    storage.num_views = 2
    storage.let_go()
    away = []
    for _ in range(2):  # outside of backward, autograd reports a retained graph
        storage.fetch(1, True)
        away.append(storage.is_away)
    assert away == [False, True]
    storage.fetch(0, True)  # a read outside of any backward, whose end is never reported
    assert storage.is_away


def test_a_prefetch_is_made_once_and_what_is_there_is_released(context: DeviceState, tensor: Tensor) -> None:
    storage = Offloading(context, tensor).storage
    storage.prefetch()  # the bytes are still on the device
    assert context.held.now_bytes == NUM_BYTES
    storage.let_go()
    storage.let_go()
    assert context.held.now_bytes == 0
    storage.prefetch()
    storage.prefetch()
    assert (storage.is_away, context.held.now_bytes, context.held.peak_bytes) == (False, NUM_BYTES, NUM_BYTES)
    storage.release()
    storage.release()
    context.held.settle()
    assert (storage.is_away, context.held.now_bytes) == (True, 0)


def test_a_backward_that_comes_early_reads_the_original(context: DeviceState, tensor: Tensor) -> None:
    storage = Offloading(context, tensor).storage
    context.leave(storage, in_flight_bytes=NUM_BYTES)

    def read() -> None:
        assert storage.fetch(1, True).data_ptr() == tensor.data_ptr()
        assert not storage.is_leaving
        with torch.enable_grad():  # as in a backward that makes a graph, which gets its own bytes
            assert storage.fetch(1, True).data_ptr() != tensor.data_ptr()

    in_backward(read)


def test_what_was_modified_in_place_is_refused(context: DeviceState, tensor: Tensor) -> None:
    storages = [KeptStorage(tensor, context, 0), Offloading(context, tensor).storage]
    tensor.add_(1)
    for storage in storages:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[64\]\] is at version 1"):
            storage.fetch(0, True)


def test_a_storage_that_dies_gives_its_host_memory_back(context: DeviceState, tensor: Tensor) -> None:
    storage = OffloadedStorage(tensor, context, 0, place_for(tensor, context), Uses())
    assert (context.bytes_live, context.held.now_bytes) == (NUM_BYTES, NUM_BYTES)
    del storage
    assert (context.bytes_live, context.held.now_bytes) == (0, 0)
    place_for(tensor, context)
    assert context.lower[0].num_allocations == 1


def test_copies_and_waits_are_ranges_of_the_trace(context: DeviceState, tensor: Tensor) -> None:
    place = place_for(tensor, context)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
        storage = OffloadedStorage(tensor, context, 7, place, Uses(), owner="layers.0.mlp")
        storage.let_go()
        storage.fetch(0, True)
        with traced_range("recompute", 8, 3 * 2**20, ""):
            pass
    names = {event.name for event in trace.events() if event.name.startswith("hf_memopt::")}
    what = ("offload", "wait for offload", "prefetch", "wait for prefetch")
    assert names == {
        *(f"hf_memopt::{each} #7 0.00 MiB layers.0.mlp" for each in what),
        "hf_memopt::recompute #8 3.00 MiB",
    }
