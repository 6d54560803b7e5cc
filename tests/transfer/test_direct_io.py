"""Tests of reads and writes in whole pages: any size and place, parts at a time, and files that end too early."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.transfer import direct_io
from hf_memopt.transfer.direct_io import PAGE, chunks, private_pages, read_memory, write_memory

SIZES = [1, 15, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE + 17]
OFFSETS = [0, 1, 64, PAGE // 2, PAGE - 1]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file that takes direct I/O, where its file system does, so that nothing but whole pages passes."""
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, 16 * PAGE)
    try:
        direct_io.bypass_page_cache(number)
        os.pwritev(number, [memoryview(private_pages(PAGE).numpy())], 0)
    except OSError:
        direct_io.bypass_page_cache(number, False)
    yield number
    os.close(number)


def memory_at(num_bytes: int, offset: int) -> Tensor:
    """Return memory that begins so far behind the beginning of a page, with other bytes around it."""
    whole = private_pages(num_bytes + offset + 2 * PAGE)
    whole.fill_(7)
    return whole[offset : offset + num_bytes]


def around(memory: Tensor) -> Tensor:
    """Return a copy of the pages that a piece of memory lies in, without its own bytes."""
    first, end = memory.storage_offset(), memory.storage_offset() + memory.nbytes
    whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
    return torch.cat([whole[:first], whole[end:]])


def random_bytes(num_bytes: int) -> Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def back_and_forth(file: int, num_bytes: int, offset: int, position: int) -> None:
    source, want = memory_at(num_bytes, offset), random_bytes(num_bytes)
    source.copy_(want)
    write_memory(file, source.data_ptr(), num_bytes, position)
    assert torch.equal(source, want)
    destination = memory_at(num_bytes, offset)
    beside = around(destination)
    read_memory(file, destination.data_ptr(), num_bytes, position)
    assert torch.equal(destination, want)
    assert torch.equal(around(destination), beside)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_bytes_come_back_and_their_neighbours_stay(file: int, num_bytes: int, offset: int) -> None:
    back_and_forth(file, num_bytes, offset, PAGE)


def test_bytes_come_back_in_a_fork_too(file: int) -> None:
    run_isolated(lambda: back_and_forth(file, 3 * PAGE + 17, 100, PAGE))


def test_pages_beside_an_extent_are_not_written_to(file: int) -> None:
    pages = random_bytes(16 * PAGE)
    aligned = memory_at(16 * PAGE, 0)
    aligned.copy_(pages)
    write_memory(file, aligned.data_ptr(), 16 * PAGE, 0)
    source = memory_at(PAGE + 1, PAGE - 1)  # touches three pages
    write_memory(file, source.data_ptr(), source.nbytes, 4 * PAGE)
    read_memory(file, aligned.data_ptr(), 16 * PAGE, 0)
    assert torch.equal(aligned[: 4 * PAGE], pages[: 4 * PAGE])
    assert torch.equal(aligned[7 * PAGE :], pages[7 * PAGE :])


Move = Callable[[int, list[memoryview], int], int]


def in_parts(move: Move, most: int) -> Move:
    """Return a call that moves at most so many bytes at a time, as the system may."""

    def moving(file: int, pages: list[memoryview], position: int) -> int:
        few, left = [], most
        for page in pages:
            few.append(page[:left])
            left -= len(few[-1])
            if not left:
                break
        return move(file, few, position)

    return moving


@pytest.mark.parametrize("most", [1, 100, PAGE, PAGE + 1, 2 * PAGE])
@pytest.mark.parametrize(("num_bytes", "offset"), [(PAGE, 0), (3 * PAGE + 17, 0), (3 * PAGE + 17, 100), (1, 5)])
def test_the_system_may_move_few_bytes_at_a_time(
    file: int, most: int, num_bytes: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_io.bypass_page_cache(file, False)  # of which any part of a page can be asked for
    monkeypatch.setattr(os, "preadv", in_parts(os.preadv, most))
    monkeypatch.setattr(os, "pwritev", in_parts(os.pwritev, most))
    back_and_forth(file, num_bytes, offset, 2 * PAGE)


@pytest.mark.parametrize("left_bytes", [0, PAGE])
def test_a_file_that_ends_too_early_is_an_error(file: int, left_bytes: int) -> None:
    os.ftruncate(file, left_bytes)
    memory = memory_at(3 * PAGE, 0)
    message = rf"the file ends at byte {left_bytes}, {3 * PAGE - left_bytes} bytes too early"
    with pytest.raises(OSError, match=message):
        read_memory(file, memory.data_ptr(), memory.nbytes, 0)


def test_a_write_that_moves_nothing_is_an_error(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    memory = memory_at(PAGE, 0)
    with pytest.raises(OSError, match="ends at byte 0"):
        write_memory(file, memory.data_ptr(), PAGE, 0)


def test_an_error_of_the_system_is_passed_on(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    memory = memory_at(PAGE, 0)
    with pytest.raises(OSError, match="Input/output error"):
        read_memory(file, memory.data_ptr(), PAGE, 0)


@pytest.mark.parametrize(
    "num_bytes", [0, 1, direct_io.CHUNK_BYTES, direct_io.CHUNK_BYTES + 1, 3 * direct_io.CHUNK_BYTES]
)
@pytest.mark.parametrize("offset", [0, 100])
def test_chunks_cover_a_tensor_and_are_cut_at_pages(num_bytes: int, offset: int) -> None:
    memory = private_pages(num_bytes + PAGE, offset)[:num_bytes]
    parts = chunks(memory)
    assert sum(size for _, size in parts) == num_bytes
    assert all(0 < size <= direct_io.CHUNK_BYTES for _, size in parts)
    end = memory.data_ptr()
    for number, (start, size) in enumerate(parts):
        assert start == end
        assert number == 0 or start % PAGE == 0
        end = start + size


@pytest.mark.parametrize("offset", OFFSETS)
def test_memory_of_our_own_begins_where_it_is_asked_to(offset: int) -> None:
    memory = private_pages(3 * PAGE, offset)
    assert (memory.nbytes, memory.data_ptr() % PAGE) == (3 * PAGE, offset)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MemoryError, match=r"cannot allocate .* of host memory"):
        private_pages(2**60)
