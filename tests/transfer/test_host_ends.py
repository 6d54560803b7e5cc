"""Tests that host memory stays until its copies end, though only the compute stream waits for them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial_copier import HOST_IS_AHEAD, AdversarialCopier
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.transfer.copier import HostBuffersInFlight
from hf_memopt.transfer.host_arena import HostArena
from hf_memopt.transfer.host_memory import _CudaArray
from hf_memopt.weights import OffloadedTeacher

SIZE = 64


@pytest.fixture
def copier() -> AdversarialCopier:
    return AdversarialCopier("late")


def go_on(copier: AdversarialCopier) -> None:
    """Run other operations until the device must have done its earlier work."""
    gc.collect()
    for _ in range(HOST_IS_AHEAD + 1):
        copier.tick()


def arena_with_a_free_block(copier: AdversarialCopier) -> HostArena:
    """Return an arena whose block was written and read, with a wait of the compute stream but none of the host."""
    arena = HostArena(copier, budget_bytes=2 * SIZE)
    block = arena.acquire(SIZE)
    assert block is not None
    memory = copier.empty_device(SIZE)
    copier.to_host(memory, block).wait()
    copier.to_device(block, memory).wait()
    arena.release(block)
    return arena


def trim(copier: AdversarialCopier) -> None:
    arena = arena_with_a_free_block(copier)
    arena.trim()
    arena.trim()
    assert arena.bytes_held == 0


def make_room(copier: AdversarialCopier) -> None:
    arena = arena_with_a_free_block(copier)
    assert arena.acquire(2 * SIZE) is not None


def drop_arena(copier: AdversarialCopier) -> None:
    arena_with_a_free_block(copier)


def drop_teacher(mode: Any) -> Callable[[AdversarialCopier], None]:
    def drop(copier: AdversarialCopier) -> None:
        network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        teacher = OffloadedTeacher(network, device="cpu", mode=mode, copier=copier)
        for _ in range(2):
            with teacher.onload() as module:
                module(torch.ones(1, 8))

    return drop


def drop_graph_and_offloader(copier: AdversarialCopier) -> None:
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)
    with offloader.offload_context(network):
        network(torch.ones(4, 8)).tanh()


WAYS = {
    "trim": trim,
    "make room": make_room,
    "end of the arena": drop_arena,
    "swapped teacher": drop_teacher("swap"),
    "streamed teacher": drop_teacher("stream"),
    "graph and offloader": drop_graph_and_offloader,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_under_queued_copies_is_kept(copier: AdversarialCopier, way: str) -> None:
    WAYS[way](copier)
    go_on(copier)


@pytest.mark.parametrize("way", WAYS)
def test_the_copier_catches_host_memory_that_is_not_kept(
    copier: AdversarialCopier, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBuffersInFlight, "hold", lambda *_: None)
    WAYS[way](copier)
    with pytest.raises(AssertionError, match="host memory was freed"):
        go_on(copier)


def test_what_is_over_is_let_go(copier: AdversarialCopier) -> None:
    block = copier.empty_host(SIZE)
    memory = StorageWeakRef(block.untyped_storage())
    copier.to_device(block, copier.empty_device(SIZE)).wait()
    del block
    go_on(copier)
    assert not memory.expired()
    copier.empty_host(SIZE)
    assert memory.expired()


def test_a_destructor_that_gets_in_between_drops_nothing_unfinished() -> None:
    """Copy from a destructor, as a garbage collection might at any time."""
    ends = HostBuffersInFlight()

    class Meddling:
        def query(self) -> bool:
            ends.drop_finished()
            return True

    class Unfinished:
        def query(self) -> bool:
            return False

    block = torch.zeros(SIZE)
    memory = StorageWeakRef(block.untyped_storage())
    ends.hold(torch.zeros(SIZE), Meddling())
    ends.hold(block, Unfinished())
    del block
    ends.drop_finished()
    assert not memory.expired()


def test_the_host_waits_for_kernels_that_read_host_memory_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    memory = torch.zeros(4, dtype=torch.uint8)
    array = _CudaArray(memory, torch.device("cuda"))
    assert not waited
    del array
    assert waited == [torch.device("cuda")]
