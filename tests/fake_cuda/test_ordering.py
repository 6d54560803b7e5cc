"""Tests of CUDA's rules of order and memory on the fake runtime, and of the wrong data that a breach gives."""

import time
from collections.abc import Iterator

import pytest
import torch

from fake_cuda import device

SIZE = 1 << 20
SLEEP_CYCLES = 40_000_000  # 20 ms


@pytest.fixture
def slow_copies() -> Iterator[None]:
    with device.settings(bytes_per_s_to_device=20 * SIZE, bytes_per_s_to_host=20 * SIZE):
        yield


@pytest.fixture
def pinned() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8).pin_memory()


def test_the_host_runs_ahead(pinned: torch.Tensor, slow_copies: None) -> None:
    on_gpu = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    with device.no_synchronization():
        on_gpu.copy_(pinned, non_blocking=True)
        for _ in range(100):
            on_gpu.add_(1)
        event = torch.cuda.current_stream().record_event()
        assert not event.query()
    event.synchronize()
    assert event.query()
    assert (on_gpu == 101).all()


def test_pageable_memory_keeps_the_host_waiting(slow_copies: None) -> None:
    on_gpu = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    assert on_gpu.to("cpu", non_blocking=True).all()


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_orders_streams_and_nothing_else_does(waits: bool) -> None:
    side, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(1)
        done = side.record_event()
    if waits:
        torch.cuda.current_stream().wait_event(done)
    total = x.sum()
    torch.cuda.synchronize()
    assert total == (1000 if waits else 0)


def test_a_wait_is_for_the_record_that_the_event_has_then() -> None:
    side, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    event = torch.cuda.current_stream().record_event()
    side.wait_event(event)
    torch.cuda._sleep(SLEEP_CYCLES)
    x.fill_(1)
    event.record()
    with torch.cuda.stream(side):
        total = x.sum()
    torch.cuda.synchronize()
    assert total == 0


def race(seed: int) -> list[float]:
    """Return 30 reads of a stream that does not wait for another, under the delays of a schedule."""
    side, x = torch.cuda.Stream(), torch.zeros(100, device="cuda")
    totals = []
    with device.settings(seed=seed, max_delay_s=0.01):
        for i in range(30):
            torch.cuda.synchronize()
            x.fill_(i)
            with torch.cuda.stream(side):
                totals.append(x.max())
        torch.cuda.synchronize()
    return [total.item() for total in totals]


def test_a_schedule_shows_a_missing_wait() -> None:
    assert race(seed=1) != [float(i) for i in range(30)]


def test_default_streams_of_other_libraries_take_turns_with_blocking_streams() -> None:
    import ctypes

    runtime = ctypes.CDLL("libcudart.so.13")
    handle = ctypes.c_void_p()
    runtime.cudaStreamCreate(ctypes.byref(handle))
    try:
        x = torch.zeros(1000, device="cuda")
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.fill_(1)
        assert x.sum() == 1000  # on the default stream, without a wait
    finally:
        runtime.cudaStreamDestroy(handle)


def test_elapsed_time_of_events() -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 20


def test_two_devices_work_at_the_same_time() -> None:
    begin = time.monotonic()
    for index in range(2):
        with torch.cuda.device(index):
            torch.cuda._sleep(10 * SLEEP_CYCLES)
            torch.zeros(8, device="cuda")
    assert time.monotonic() - begin < 0.2
    for index in range(2):
        torch.cuda.synchronize(index)


def test_copies_between_devices() -> None:
    x = torch.arange(1000, device="cuda:0").reshape(10, 100)
    moved = x.T.to("cuda:1")
    assert moved.device.index == 1
    assert torch.equal(moved.cpu(), x.T.cpu())
    assert torch.equal((moved.float() @ moved.float().T).cpu(), x.T.cpu().float() @ x.cpu().float())


def test_two_devices_have_memory_of_their_own() -> None:
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.mem_get_info(0)[0] == free[0]
    assert torch.cuda.mem_get_info(1)[0] <= free[1] - held.nbytes


def test_a_full_device_is_out_of_memory_as_torch_says_it() -> None:
    device.leave_free(64 << 20)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
            torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
        assert torch.empty(60 << 20, dtype=torch.uint8, device="cuda").is_cuda
        torch.cuda.empty_cache()
    finally:
        device.give_back()


def test_registered_memory_is_what_torch_calls_pinned(pinned: torch.Tensor) -> None:
    assert pinned.is_pinned()
    assert not torch.ones(8).is_pinned()


def test_new_memory_holds_poison() -> None:
    assert torch.empty(30 << 20, device="cuda").isnan().all()
