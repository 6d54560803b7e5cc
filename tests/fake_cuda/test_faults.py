"""Each kind of fault, planted: the fake CUDA runtime finds it, at the call or at the end of the test."""

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from fake_cuda import device
from fake_cuda.plugin import ExpectFaults

SIZE = 1 << 20
SLOW = 20 * SIZE  # bytes a second: a copy of SIZE takes 50 ms
SLEEP_CYCLES = 40_000_000  # 20 ms
SUCCESS, INVALID_VALUE, INVALID_HANDLE = 0, 1, 400


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


class Pages(mmap.mmap):
    """Anonymous memory with its address. As torch sees it: a tensor of bytes."""

    def __new__(cls, size: int = SIZE) -> "Pages":
        return super().__new__(cls, -1, size)

    @property
    def address(self) -> int:
        view = ctypes.c_char.from_buffer(self)
        return ctypes.addressof(view)

    def tensor(self) -> torch.Tensor:
        """Does not keep the pages alive."""
        return torch.frombuffer((ctypes.c_ubyte * len(self)).from_address(self.address), dtype=torch.uint8)


def register(pages: Pages) -> None:
    assert runtime().cudaHostRegister(ctypes.c_void_p(pages.address), ctypes.c_size_t(len(pages)), 0) == SUCCESS


def unregister(address: int) -> int:
    return runtime().cudaHostUnregister(ctypes.c_void_p(address))


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
    other = torch.empty(0, device="cuda").set_(ones.untyped_storage())  # same storage: not freed with `ones`
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


class Range(ctypes.Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def nothing(_: int) -> None:
    pass


def test_a_kernel_on_memory_of_another_device(expect_faults: ExpectFaults) -> None:
    there = torch.zeros(8, device="cuda:1")
    with pytest.raises(RuntimeError, match="devices"):
        torch.zeros(8, device="cuda:0") + there
    expect_faults()
    memory = Range(there.data_ptr(), there.nbytes)
    runtime().fake_cuda_launch(None, b"planted", ctypes.byref(memory), ctypes.c_size_t(1), nothing, nothing, None)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        torch.cuda.synchronize()
    expect_faults("planted on device 0 came to memory of device 1", "an error stayed behind")


def test_a_kernel_on_a_stream_of_another_device(expect_faults: ExpectFaults) -> None:
    stream = ctypes.c_void_p(torch.cuda.Stream(1).cuda_stream)
    code = runtime().fake_cuda_launch(stream, b"planted", None, ctypes.c_size_t(0), nothing, nothing, None)
    assert code == INVALID_HANDLE
    expect_faults("the stream belongs to another device", "an error stayed behind")


def test_an_event_on_a_stream_of_another_device(expect_faults: ExpectFaults) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    stream = torch.cuda.Stream(1)
    code = runtime().cudaEventRecord(ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream))
    assert code == INVALID_HANDLE
    expect_faults("the event belongs to another device", "an error stayed behind")


def test_an_event_that_was_destroyed(expect_faults: ExpectFaults) -> None:
    event = torch.cuda.Event()
    event.record()
    handle = event.cuda_event
    del event
    assert runtime().cudaEventQuery(ctypes.c_void_p(handle)) == INVALID_HANDLE
    expect_faults("no such event", "an error stayed behind")


@pytest.mark.parametrize("wait", ["synchronize", "stream", "event", "item", "pageable copy", "nonzero"])
def test_waiting_where_nothing_may(wait: str, on_gpu: torch.Tensor, expect_faults: ExpectFaults) -> None:
    event = torch.cuda.current_stream().record_event()
    waits = {
        "synchronize": torch.cuda.synchronize,
        "stream": torch.cuda.current_stream().synchronize,
        "event": event.synchronize,
        "item": on_gpu.sum().item,
        "pageable copy": on_gpu.cpu,
        "nonzero": on_gpu.nonzero,
    }
    with device.no_synchronization():
        on_gpu.add_(1)
        waits[wait]()
    found = device.faults()
    assert found
    assert all("keeps the host waiting" in fault for fault in found)
    expect_faults("keeps the host waiting")


@pytest.mark.parametrize("wait", ["item", "nonzero", "mask"])
def test_sync_debug_mode_knows_what_waits(wait: str, on_gpu: torch.Tensor) -> None:
    waits = {"item": on_gpu.sum().item, "nonzero": on_gpu.nonzero, "mask": lambda: on_gpu[on_gpu > 0]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns, once, of being a prototype
            torch.cuda.set_sync_debug_mode("error")
        on_gpu.add_(1)
        with pytest.raises(RuntimeError, match="synchronizing"):
            waits[wait]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_index_out_of_range_breaks_the_device(expect_faults: ExpectFaults) -> None:
    table, index = torch.zeros(4, 4, device="cuda"), torch.tensor([7], device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    table[index]  # the error comes later
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="device-side assert"):
        table + 1
    expect_faults("aten::index", "an error stayed behind")


def test_an_error_that_nobody_reads_comes_with_the_next_kernel(expect_faults: ExpectFaults) -> None:
    x = torch.zeros(4, device="cuda")
    assert unregister(12345) != SUCCESS
    with pytest.raises(RuntimeError, match="cudaErrorHostMemoryNotRegistered"):
        x.normal_()
    expect_faults("not registered")


@pytest.mark.parametrize("kind", ["malloc", "host_register", "copy", "event"])
def test_planned_failures(kind: str, on_gpu: torch.Tensor, expect_faults: ExpectFaults) -> None:
    pages = Pages()

    def use() -> None:
        if kind == "malloc":
            torch.empty(64 << 20, device="cuda")
            torch.cuda.empty_cache()
        elif kind == "host_register":
            register(pages)
            unregister(pages.address)
        elif kind == "copy":
            on_gpu.fill_(1)
            on_gpu.cpu()
        else:
            torch.cuda.current_stream().record_event()

    device.fail(kind, k=2, times=2)  # torch's allocator frees what it can and tries a second time
    use()
    with pytest.raises((RuntimeError, AssertionError)):
        use()
    device.forget_faults()
    use()
    expect_faults()


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


def test_gpu_code_cannot_run(expect_faults: ExpectFaults) -> None:
    assert runtime().cudaLaunchKernel(None, *[ctypes.c_void_p()] * 8) != SUCCESS
    expect_faults("nothing here can run", "an error stayed behind")


def test_what_is_missing_says_its_name(expect_faults: ExpectFaults) -> None:
    assert runtime().cudaMallocAsync() != SUCCESS
    expect_faults("cudaMallocAsync is not part", "an error stayed behind")


def test_a_forked_child_cannot_use_cuda() -> None:
    child = os.fork()
    if child == 0:
        os._exit(runtime().cudaDeviceSynchronize())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3  # cudaErrorInitializationError
