"""Tests that the fake CUDA runtime finds planted misuse of devices, streams and events, planted waits and errors."""

import ctypes
import os
import warnings

import pytest
import torch

from fake_cuda import device
from fake_cuda.pages import SIZE, SUCCESS, Pages, register, runtime, unregister
from fake_cuda.plugin import ExpectFaults

SLEEP_CYCLES = 40_000_000  # 20 ms
INVALID_HANDLE = 400


@pytest.fixture
def on_gpu() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device="cuda")


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
            warnings.simplefilter("ignore")  # the mode warns once that it is a prototype
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

    device.fail(kind, k=2, times=2)  # torch's allocator releases its cache and tries a second time
    use()
    with pytest.raises((RuntimeError, AssertionError)):
        use()
    device.forget_faults()
    use()
    expect_faults()


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
