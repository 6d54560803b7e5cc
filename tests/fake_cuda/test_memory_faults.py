"""Tests that the fake CUDA runtime finds planted misuse of memory, at the call or at the end of the test."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from fake_cuda import device
from fake_cuda.pages import SIZE, SUCCESS, Pages, register, runtime, unregister
from fake_cuda.plugin import ExpectFaults

SLOW = 20 * SIZE  # bytes a second: a copy of SIZE takes 50 ms
SLEEP_CYCLES = 40_000_000  # 20 ms
INVALID_VALUE = 1


@pytest.fixture
def on_gpu() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device="cuda")


@pytest.fixture
def slow_copies() -> Iterator[None]:
    with device.settings(bytes_per_s_to_device=SLOW, bytes_per_s_to_host=SLOW):
        yield


def test_nothing_is_found_where_nothing_is_wrong(on_gpu: torch.Tensor, expect_faults: ExpectFaults) -> None:
    pages = Pages()
    register(pages)
    on_gpu.copy_(pages.tensor(), non_blocking=True)
    torch.cuda.synchronize()
    assert unregister(pages.address) == SUCCESS
    expect_faults()


def test_unmapping_registered_memory(expect_faults: ExpectFaults) -> None:
    pages = Pages()
    address = pages.address
    register(pages)
    pages.close()
    expect_faults("registered memory was unmapped")
    assert unregister(address) == INVALID_VALUE
    expect_faults("unmapped before", "an error stayed behind")


def test_unregistering_while_a_copy_is_on_its_way(
    on_gpu: torch.Tensor, slow_copies: None, expect_faults: ExpectFaults
) -> None:
    pages = Pages()
    register(pages)
    on_gpu.copy_(pages.tensor(), non_blocking=True)
    assert unregister(pages.address) == INVALID_VALUE
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        torch.cuda.synchronize()
    expect_faults("cudaHostUnregister while a copy is on its way", "a copy came to memory", "an error stayed behind")


def test_unmapping_while_a_copy_is_on_its_way(
    on_gpu: torch.Tensor, slow_copies: None, expect_faults: ExpectFaults
) -> None:
    pages = Pages()
    address = pages.address
    register(pages)
    on_gpu.copy_(pages.tensor(), non_blocking=True)
    pages.close()
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        torch.cuda.synchronize()
    unregister(address)
    expect_faults(
        "memory was unmapped while a copy", "a copy came to memory", "unmapped before", "an error stayed behind"
    )


def test_copying_from_memory_that_is_not_there(on_gpu: torch.Tensor, expect_faults: ExpectFaults) -> None:
    pages = Pages()
    gone = pages.tensor()
    pages.close()
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        on_gpu.copy_(gone, non_blocking=True)
    expect_faults("from memory that is not there")


def test_registering_twice(expect_faults: ExpectFaults) -> None:
    pages = Pages()
    register(pages)
    with pytest.raises(AssertionError):
        register(pages)
    unregister(pages.address)
    expect_faults("registered already", "an error stayed behind")


def test_copying_to_freed_memory(expect_faults: ExpectFaults) -> None:
    pointer = ctypes.c_void_p()
    runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(SIZE))
    runtime().cudaFree(pointer)
    assert runtime().cudaMemset(pointer, 0, ctypes.c_size_t(SIZE)) == INVALID_VALUE
    expect_faults("cudaMemset of memory that is not a device's", "an error stayed behind")


def test_a_kernel_on_freed_memory(expect_faults: ExpectFaults) -> None:
    class Freed:
        def __init__(self) -> None:
            pointer = ctypes.c_void_p()
            runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(SIZE))
            self.pointer = pointer
            self.__cuda_array_interface__ = {
                "shape": (SIZE,),
                "typestr": "|u1",
                "data": (pointer.value, False),
                "version": 2,
            }

    memory = Freed()
    tensor = torch.as_tensor(memory, device="cuda")
    runtime().cudaFree(memory.pointer)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.add_(1)  # the error comes later
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        torch.cuda.synchronize()
    expect_faults("aten::add_", "an error stayed behind")


def test_reading_a_freed_tensor_gives_poison() -> None:
    ones = torch.ones(1000, device="cuda")
    other = torch.empty(0, device="cuda").set_(ones.untyped_storage())  # shares storage: not freed with `ones`
    del ones
    assert other.sum() == 1000
    address = other.data_ptr()
    del other
    again = torch.empty(1000, device="cuda")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_memory_used_by_a_stream_that_the_allocator_does_not_know() -> None:
    side = torch.cuda.Stream()
    ones = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        total = ones.sum()
    del ones  # without record_stream
    torch.cuda.synchronize()
    assert total.isnan()


def test_what_is_left_over_is_counted() -> None:
    before = device.holdings()
    pages, tensor, event = Pages(), torch.zeros(8, device="cuda"), torch.cuda.Event(enable_timing=True)
    register(pages)
    event.record()
    left = device.holdings().more_than(before)
    assert left == ["1 registrations left over", "1 device_blocks left over", "1 events left over"]
    unregister(pages.address)
    del tensor, event
    assert not device.holdings().more_than(before)
