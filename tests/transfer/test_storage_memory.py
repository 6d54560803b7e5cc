"""Tests that memory of a storage is there when it is given, goes back when it is taken, and is never another's."""

import faulthandler
import os
import resource
import signal
from collections.abc import Callable

import pytest
import torch

from benchmarks.limit.limited_process import read_sample
from hf_memopt.transfer import storage_memory
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.storage_memory import ResizedMemory, SparePages, StorageMemory, WholePages
from hf_memopt.units import MIB

needs_linux = pytest.mark.skipif(not WholePages.are_available(), reason="whole pages are Linux's")
KINDS: dict[str, Callable[[int], StorageMemory]] = {
    "resized": lambda num_bytes: ResizedMemory(num_bytes, torch.device("cpu"), "gone"),
    "pages": lambda num_bytes: WholePages(num_bytes, 0, "gone", SparePages()),
    "pages, offset": lambda num_bytes: WholePages(num_bytes, 520, "gone", SparePages()),
}


def in_a_fork(function: Callable[[], object]) -> int:
    """Return the exit code of a fork that calls a function, negative for a signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # which would print the signal
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_linux
@pytest.mark.parametrize("num_bytes", [1, PAGE, 5 * MIB + 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_block_is_the_same_tensor_each_time(kind: str, num_bytes: int) -> None:
    memory = KINDS[kind](num_bytes)
    alias = memory.block.view(num_bytes)
    memory.take()
    for value in (3, 5):
        to_fill = memory.give()
        with pytest.raises(RuntimeError, match="gone"):
            alias.sum()
        to_fill.fill_(value)
        memory.show()
        assert torch.equal(alias, torch.full((num_bytes,), value, dtype=torch.uint8))
        memory.take()
        for access in (alias.sum, memory.block.is_shared, lambda: alias.add_(1), memory.block.tolist):
            with pytest.raises(RuntimeError, match="gone"):
                access()


@needs_linux
@pytest.mark.parametrize("offset", [0, 8, PAGE - 2])
def test_blocks_lie_within_their_own_pages(offset: int) -> None:
    memory = WholePages(5 * MIB + 3, offset, "gone", SparePages())
    assert memory.pages.data_ptr() % PAGE == 0
    assert memory.block.data_ptr() == memory.pages.data_ptr() + offset
    assert memory.pages.nbytes % PAGE == 0
    assert memory.block.untyped_storage().nbytes() == memory.block.nbytes
    memory.pages.fill_(1)
    assert memory.block.sum() == memory.block.nbytes


@needs_linux
def test_pages_go_back_to_the_system() -> None:
    spare = SparePages()
    memory = WholePages(64 * MIB, 8, "gone", spare)
    memory.take()
    spare.free()
    before = read_sample(os.getpid())
    memory.give().fill_(1)
    full = read_sample(os.getpid())
    memory.take()
    spare.free()
    after = read_sample(os.getpid())
    assert before is not None
    assert full is not None
    assert after is not None
    assert full.anonymous_bytes - before.anonymous_bytes > 60 * MIB
    assert after.anonymous_bytes - before.anonymous_bytes < 4 * MIB
    assert full.private_bytes - after.private_bytes >= 64 * MIB  # reserved addresses do not count


@needs_linux
def test_spare_pages_move_with_what_is_in_them() -> None:
    spare = SparePages()
    sizes = (4 * MIB, 2 * MIB, 9 * MIB + 3, 9 * MIB + 3)
    first, second, third, fourth = (WholePages(each, 520, "gone", spare) for each in sizes)
    for memory in (third, fourth):
        memory.take()
    spare.free()
    first.block.fill_(1)
    second.block.fill_(2)
    for memory in (first, second):
        memory.take()
    third.give()
    # A huge page of the second, two of the first, and new ones.
    found = [int(third.pages[start]) for start in range(1 * MIB, 9 * MIB, 2 * MIB)]
    assert found == [2, 1, 1, 0]
    for memory in (first, second):
        assert in_a_fork(memory.pages.sum) == -signal.SIGSEGV
        assert memory.give()[:MIB].sum() == 0
    third._to_fill.fill_(3)
    third.show()
    third.take()
    assert in_a_fork(third.pages[-3:].sum) == -signal.SIGSEGV  # less than a huge page is not kept
    fourth.give()
    assert (fourth.pages[: 8 * MIB : 4096].int() == 3).sum() == 4 * 512 - 1  # the first page begins before the block
    assert in_a_fork(third.pages.sum) == -signal.SIGSEGV
    fourth.take()
    assert int(fourth.give()[MIB]) == 3  # its own
    fourth.take()
    first.take()
    assert int(first.give()[MIB]) == 0
    fourth.give().fill_(4)
    assert int(first._to_fill.max()) == 0
    fourth.take()
    for memory in (second, third):
        memory.take()
        memory.give().fill_(5)
        memory.show()
        assert memory.block.sum() == 5 * memory.block.nbytes


@needs_linux
def test_pages_are_new_where_the_system_cannot_move_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = SparePages()
    first, second, third = memories = [WholePages(8 * MIB, 0, "gone", spare) for _ in range(3)]
    first.take()
    spare.free()
    for memory in memories[1:]:
        memory.block.fill_(1)
        memory.take()
    monkeypatch.setattr(storage_memory._libc(), "mremap", lambda *arguments: -1)
    assert not first.give().any()
    for memory in (second, third):
        assert in_a_fork(memory.pages.sum) == -signal.SIGSEGV


@needs_linux
def test_a_read_without_memory_gives_no_bytes() -> None:
    spare = SparePages()
    memory = WholePages(PAGE, 0, "gone", spare)
    memory.take()
    spare.free()
    assert in_a_fork(memory.pages.sum) == -signal.SIGSEGV
    memory.give()
    assert in_a_fork(memory.pages.sum) == 0


@needs_linux
def test_forks_see_no_pages_that_a_read_goes_to() -> None:
    memory = WholePages(PAGE, 0, "gone", SparePages())
    memory.block.fill_(7)

    def expect_sevens() -> None:
        assert bool((memory.block == 7).all())

    memory.share_with_forks(False)
    # The addresses are free in the fork, which may map something else there before it reads.
    assert in_a_fork(expect_sevens) in (-signal.SIGSEGV, 1)
    memory.share_with_forks(True)
    assert in_a_fork(expect_sevens) == 0


@needs_linux
def test_a_lack_of_memory_is_an_error() -> None:
    spare = SparePages()
    memory = WholePages(256 * MIB, 0, "gone", spare)
    memory.take()
    spare.free()

    def give_under_a_limit() -> None:
        sample = read_sample(os.getpid())
        assert sample is not None
        resource.setrlimit(resource.RLIMIT_DATA, (sample.private_bytes + 64 * MIB,) * 2)
        with pytest.raises(MemoryError, match=r"cannot allocate 256\.00 MiB of host memory: Cannot allocate memory"):
            memory.give()

    assert in_a_fork(give_under_a_limit) == 0
