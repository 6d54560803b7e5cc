"""Tests of page-locked memory: exact sizes, unregistered before it is unmapped, pageable if registration fails."""

import logging
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from torch._logging._internal import warning_once

from hf_memopt.transfer import host_memory

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class FakeRuntime:
    """A stand-in for CUDA's registrations of host memory, whose calls return `error`."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.registered: list[tuple[int, int]] = []
        self.mapped_until_unregistered: list[bool] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered.append((address, num_bytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.mapped_until_unregistered.append(is_mapped(address))
        self.registered = [entry for entry in self.registered if entry[0] != address]
        return self.error


def is_mapped(address: int) -> bool:
    """Return whether an address is in a mapping of our own. The heap may take an unmapped address at once."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= address < end:
            return "/dev/zero" in line
    return False


def test_pinned_memory_has_the_exact_size_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = host_memory.pinned_empty(1000, torch.device("cuda"))
    neighbour = host_memory.pinned_empty(1000, torch.device("cuda"))
    assert block.data_ptr() % mmap.PAGESIZE == neighbour.data_ptr() % mmap.PAGESIZE == 0
    del neighbour
    view = block[10:].fill_(3)
    assert runtime.registered == [(block.data_ptr(), 1000)]
    del block
    assert runtime.registered
    assert view.sum() == 3 * 990
    del view
    assert not runtime.registered


@pytest.mark.skipif(HUGE_PAGES is None, reason="this system has no huge pages to ask for")
@pytest.mark.parametrize(("num_bytes", "advice"), [(64 * 2**20 - 1, []), (64 * 2**20, [HUGE_PAGES])])
def test_large_blocks_ask_for_huge_pages(num_bytes: int, advice: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=0))
    monkeypatch.setattr(host_memory.Pages, "madvise", lambda self, option: given.append(option), raising=False)
    host_memory.pinned_empty(num_bytes, torch.device("cuda"))
    assert given == advice


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's list of mapped memory")
def test_pages_are_unregistered_before_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = host_memory.pinned_empty(1000, torch.device("cuda"))
    address = block.data_ptr()
    assert is_mapped(address)
    del block
    assert runtime.mapped_until_unregistered == [True]
    assert not is_mapped(address)


def test_a_refused_unregistration_is_cleared_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime(error=0)
    cleared: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_memory, "_clear_last_error", cleared.append)
    warning_once.cache_clear()
    blocks = [host_memory.pinned_empty(1000, torch.device("cuda")) for _ in range(3)]
    runtime.error = 62
    with caplog.at_level(logging.WARNING):
        del blocks
    assert cleared == 3 * [torch.device("cuda")]
    assert [record.message for record in caplog.records] == [
        "cannot give page-locked host memory back: cudaHostUnregister returned error 62"
    ]


def test_a_forked_process_leaves_the_registration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = host_memory.pinned_empty(1000, torch.device("cuda"))
    monkeypatch.setattr(os, "getpid", lambda: 0)
    del block
    assert runtime.registered


def test_memory_that_cannot_be_pinned_is_pageable_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    monkeypatch.setattr(host_memory, "_clear_last_error", lambda device: None)
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        blocks = [host_memory.pinned_empty(1000, torch.device("cuda")) for _ in range(3)]
    assert [block.nbytes for block in blocks] == [1000] * 3
    assert len(caplog.records) == 1
    assert "cudaHostRegister returned error 2" in caplog.text
    assert "ulimit -l" in caplog.text
