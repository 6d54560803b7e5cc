"""Tests of page-locked host memory: registered while it is mapped and while copies use it."""

import gc
import os
from pathlib import Path

import pytest
import torch
from fake_cuda import device as fake_device
from torch import nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer.host_memory import Pages, pinned_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = 2**20
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
SLEEP_CYCLES = 400_000_000  # 200 ms


def test_memory_is_unregistered_before_it_is_unmapped() -> None:
    for _ in range(4):
        assert pinned_empty(SIZE, torch.device("cuda")).is_pinned()  # an earlier error would fail the next call
        gc.collect()
    torch.zeros(1, device="cuda").normal_()


def test_memory_comes_and_goes_a_thousand_times() -> None:
    """Count registered and resident bytes."""
    before = resident_bytes()
    for _ in range(1000):
        block = pinned_empty(SIZE, torch.device("cuda"))
        assert block.fill_(1).is_pinned()
        del block
    assert resident_bytes() - before < 50 * SIZE


def test_a_block_takes_no_more_than_was_asked_for() -> None:
    """Choose a size that torch's own allocator would round up to 128 MiB."""
    before = resident_bytes()
    block = pinned_empty(65 * SIZE, torch.device("cuda")).fill_(1)
    assert resident_bytes() - before == pytest.approx(block.nbytes, abs=8 * SIZE)


def test_a_refusal_is_a_code_and_does_not_fail_what_follows() -> None:
    pages = Pages(-1, SIZE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    assert pages.register(address, torch.device("cuda")) == 0
    assert pages.register(address, torch.device("cuda")) == ALREADY_REGISTERED
    assert torch.ones(4, device="cuda").sum().item() == 4
    if fake_device.is_loaded():  # the fake GPU counts each refusal as a fault
        assert len(fake_device.faults()) == 1
        fake_device.forget_faults()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_an_offloader_that_is_dropped_waits_for_its_copies() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0)
    x = torch.randn(1024, 256, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    with offloader.offload_context(model):
        loss = model(x).square().mean()
    del loss, offloader
    gc.collect()
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda").normal_()
