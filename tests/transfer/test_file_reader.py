"""Tests that any bytes of a block in files arrive, through a small ring or directly, and that no failure is hidden."""

import ctypes
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from torch import Tensor

from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.transfer import file_reader
from hf_memopt.transfer.direct_io import PAGE, private_pages
from hf_memopt.transfer.file_reader import BlockInFiles, DirectReads, Piece, ReadFile, StagedReads
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.transfer.storage_memory import WholePages

NUM_BYTES = 5 * PAGE + 123


@pytest.fixture
def contents() -> Tensor:
    return torch.randint(256, (NUM_BYTES,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.fixture
def path(tmp_path: Path, contents: Tensor) -> Path:
    (tmp_path / "bytes").write_bytes(contents.numpy().tobytes())
    return tmp_path / "bytes"


def opened(path: Path) -> ReadFile:
    return ReadFile(path.open("rb", buffering=0), str(path))


def pieces_of(file: ReadFile, rng: random.Random) -> list[Piece]:
    """Return pieces at any place of the file, with gaps in the block."""
    pieces, start = [], 0
    for _ in range(rng.randint(1, 6)):
        start += rng.choice([0, 0, 7, 5000])
        position = rng.randrange(NUM_BYTES)
        num_bytes = rng.randint(1, NUM_BYTES - position)
        pieces.append(Piece(start, num_bytes, file, position))
        start += num_bytes
    return pieces


@pytest.mark.parametrize("position", [0, 1, PAGE - 1, PAGE, 2 * PAGE + 17])
@pytest.mark.parametrize("num_bytes", [1, 100, PAGE, 2 * PAGE + 1])
def test_any_bytes_are_read(path: Path, contents: Tensor, position: int, num_bytes: int) -> None:
    got = opened(path).read(position, num_bytes, private_pages(6 * PAGE))
    assert torch.equal(got, contents[position : position + num_bytes])


def test_a_fork_reads_files_of_its_own(path: Path, contents: Tensor) -> None:
    def read_all() -> bool:
        destination = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        DirectReads(BlockInFiles([Piece(0, NUM_BYTES, opened(path), 0)])).read(0, destination).wait()
        return torch.equal(destination, contents)

    assert run_isolated(read_all)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["direct", "early", "late", "random"])
def test_a_block_is_what_its_pieces_say(
    path: Path, contents: Tensor, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    rng = random.Random(seed)
    pieces = pieces_of(opened(path), rng)
    block = BlockInFiles(pieces)
    copier = AdversarialCopier("late" if kind == "direct" else kind, seed)
    reads = DirectReads(block) if kind == "direct" else StagedReads(block, copier)
    whole = torch.zeros(block.num_bytes, dtype=torch.uint8)
    for piece in pieces:
        whole[piece.start : piece.start + piece.num_bytes] = contents[piece.position :][: piece.num_bytes]
    under_way = []
    for _ in range(8):
        start = rng.randrange(block.num_bytes)
        destination = torch.zeros(rng.randint(1, block.num_bytes - start), dtype=torch.uint8)
        under_way.append((start, destination, reads.read(start, destination)))
    rng.shuffle(under_way)
    for start, destination, read in under_way:
        read.wait()
        read.wait()
        for piece in pieces:
            begin, end = max(start, piece.start), min(start + destination.nbytes, piece.start + piece.num_bytes)
            assert torch.equal(destination[begin - start : max(begin, end) - start], whole[begin : max(begin, end)])


@pytest.mark.skipif(not WholePages.are_available(), reason="whole pages are Linux's")
@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_read_to_their_own_pages(
    path: Path, contents: Tensor, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    pieces = pieces_of(opened(path), random.Random(seed))
    reads = DirectReads(BlockInFiles(pieces))
    memories = [reads.memory(piece.start, piece.num_bytes, "gone") for piece in pieces]
    monkeypatch.delattr(ctypes, "memmove")  # nothing is copied
    for _ in range(2):
        under_way = [reads.read(piece.start, memory.give()) for piece, memory in zip(pieces, memories, strict=True)]
        for piece, memory, read in zip(pieces, memories, under_way, strict=True):
            read.wait()
            memory.show()
            assert torch.equal(memory.block, contents[piece.position :][: piece.num_bytes])
            memory.take()


def test_no_more_than_the_ring_is_read_ahead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    reads = itertools.count()
    preadv = os.preadv
    block = BlockInFiles([Piece(number * NUM_BYTES, NUM_BYTES, opened(path), 0) for number in range(5)])
    monkeypatch.setattr(os, "preadv", lambda *arguments: (next(reads), preadv(*arguments))[1])
    staged = StagedReads(block, AdversarialCopier("late"))
    read = staged.read(0, torch.zeros(block.num_bytes, dtype=torch.uint8))
    block.wait([fetched for *_, fetched in staged._reading])
    assert next(reads) == 8
    read.wait()
    assert staged.host_bytes == 8 * 2 * PAGE


def test_neighbours_are_read_together(path: Path) -> None:
    file = opened(path)
    block = BlockInFiles([Piece(0, 100, file, 512), Piece(256, 100, file, 768), Piece(512, 100, file, 4096)])
    assert [(part.start, part.num_bytes, part.position) for part in block.parts(0, 612)] == [
        (0, 356, 512),
        (512, 100, 4096),
    ]


# ------------------------------------------------------------------------------------------------ faults


def reads_of(kind: str, block: BlockInFiles, fail_at: int | None = None) -> DirectReads | StagedReads:
    return DirectReads(block) if kind == "direct" else StagedReads(block, AdversarialCopier("late", fail_at=fail_at))


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_a_failed_read_raises_at_every_wait_and_the_next_is_right(
    path: Path, contents: Tensor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reads_of(kind, BlockInFiles([Piece(0, NUM_BYTES, opened(path), 0)]))

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    destination = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        read = reads.read(0, destination)
        for _ in range(2):
            with pytest.raises(DiskError, match=r"bytes: reading 20\.12 KiB from byte 0 on failed: Input/output error"):
                read.wait()
    with pytest.raises(DiskError):
        read.wait()
    reads.read(0, destination).wait()
    assert torch.equal(destination, contents)


def test_a_failed_copy_raises_at_every_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    for fail_at in range(1, 13):  # a copy and a wait of each part
        reads = reads_of("staged", BlockInFiles([Piece(0, NUM_BYTES, opened(path), 0)]), fail_at)
        read = reads.read(0, torch.zeros(NUM_BYTES, dtype=torch.uint8))
        for _ in range(2):
            with pytest.raises(InjectedError):
                read.wait()


def test_short_reads_are_continued(path: Path, contents: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][: PAGE + 512]], offset))
    got = opened(path).read(3, NUM_BYTES - 3, private_pages(6 * PAGE))
    assert torch.equal(got, contents[3:])


def test_the_end_of_a_file_is_an_error(path: Path) -> None:
    with pytest.raises(
        DiskError, match=f"bytes: reading 300 B from byte 20403 on failed: the file ends at byte {NUM_BYTES}"
    ):
        opened(path).read(NUM_BYTES - 200, 300, private_pages(6 * PAGE))


def write(path: Path, mode: str) -> None:
    time.sleep(0.02)  # file systems have clocks of some milliseconds
    with path.open(mode) as file:
        file.write(b"x" * 100)


def write_and_put_the_time_back(path: Path) -> None:
    before = path.stat()
    write(path, "r+b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link(path: Path) -> None:
    path.with_name("other").hardlink_to(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: write(path, "r+b"),
    "written, the time put back": write_and_put_the_time_back,
    "written, the time put back, linked": lambda path: (write_and_put_the_time_back(path), link(path)),
    "written, the time put back, deleted": lambda path: (write_and_put_the_time_back(path), path.unlink()),
    "appended to": lambda path: write(path, "ab"),
    "truncated": lambda path: os.truncate(path, 100),
    "touched": lambda path: os.utime(path, ns=(0, 0)),
}
NO_CHANGES: dict[str, Callable[[Path], object]] = {
    "linked": link,
    "deleted": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(path.with_name("other")),
    "made unreadable": lambda path: path.chmod(0),
    "replaced": lambda path: (path.with_name("new").write_bytes(b"y"), path.with_name("new").replace(path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_refused(path: Path, change: str) -> None:
    file = opened(path)
    file.remember()
    file.check()
    CHANGES[change](path)
    for _ in range(2):
        with pytest.raises(DiskError, match=r"bytes: the file was changed after it was opened, with 20\.12 KiB"):
            file.check()


@pytest.mark.parametrize("change", NO_CHANGES)
def test_files_may_lose_their_names(path: Path, contents: Tensor, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    file = opened(path)
    file.remember()
    NO_CHANGES[change](path)
    file.check()
    monkeypatch.setattr(file_reader, "zlib", None)  # nothing is compared a second time
    file.check()
    assert torch.equal(file.read(0, NUM_BYTES, private_pages(6 * PAGE)), contents)


def test_a_new_name_is_refused_where_the_bytes_are_unknown(path: Path) -> None:
    file = opened(path)
    link(path)
    for call in (file.check, file.remember, file.check):
        with pytest.raises(DiskError, match=r"bytes: the file was changed after it was opened"):
            call()


READS: dict[str, Callable[[BlockInFiles, Tensor], None]] = {
    "direct": lambda block, memory: DirectReads(block).read(0, memory).wait(),
    "staged": lambda block, memory: StagedReads(block, AdversarialCopier("late")).read(0, memory).wait(),
    "gathered": lambda block, memory: block.files[0].gather([(0, 9000), (9000, NUM_BYTES - 9000)], memory),
}


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_or_amid_a_read_is_refused(
    path: Path, kind: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = BlockInFiles([Piece(0, NUM_BYTES, opened(path), 0)])
    memory = torch.empty(NUM_BYTES, dtype=torch.uint8)
    preadv, changes = os.preadv, [CHANGES[change]]

    def changing(*arguments: object) -> int:
        while changes:
            changes.pop()(path)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", changing)
    for _ in range(2):
        with pytest.raises(DiskError, match=r"bytes: the file was changed.*; restore it and start again"):
            READS[kind](block, memory)
    assert changes == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", READS)
def test_a_file_truncated_at_any_moment_gives_its_bytes_or_an_error(
    path: Path, contents: Tensor, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)
    rng = random.Random(seed)
    length, delay_s = rng.randrange(NUM_BYTES), 0.02 * rng.random()

    def read_until_it_fails() -> str:
        block = BlockInFiles([Piece(0, NUM_BYTES, opened(path), 0)])
        threading.Timer(delay_s, os.truncate, (path, length)).start()
        while True:
            memory = torch.zeros(NUM_BYTES, dtype=torch.uint8)
            try:
                READS[kind](block, memory)
            except DiskError as error:
                return str(error)
            if not torch.equal(memory, contents):
                return "other bytes"

    assert "bytes: the file was changed" in run_isolated(read_until_it_fails)


def test_ranges_are_gathered_in_their_order_and_not_in_forks(path: Path, contents: Tensor) -> None:
    file = opened(path)
    ranges = [(5000, 3000), (0, 10), (5000, 1), (NUM_BYTES - 7, 7)]
    memory = torch.zeros(3018, dtype=torch.uint8)
    file.gather(ranges, memory)
    assert torch.equal(memory, torch.cat([contents[start : start + length] for start, length in ranges]))

    def gather() -> str:
        with pytest.raises(DiskError) as error:
            file.gather(ranges, memory)
        return str(error.value)

    assert "has it open, of which this is a fork" in run_isolated(gather)


def test_a_range_that_ends_behind_the_file_is_an_error(path: Path) -> None:
    with pytest.raises(
        DiskError, match=f"bytes: reading 100 B from byte {NUM_BYTES} on failed: the file ends at byte {NUM_BYTES}"
    ):
        opened(path).gather([(NUM_BYTES - 200, 300)], torch.empty(300, dtype=torch.uint8))


def test_a_file_that_became_shorter_is_not_mapped(path: Path) -> None:
    file = opened(path)
    os.truncate(path, 100)
    with pytest.raises(DiskError, match=r"bytes: the file was changed after it was opened"):
        file.mapped()


def test_a_block_of_nothing_is_read(tmp_path: Path) -> None:
    block = BlockInFiles([])
    StagedReads(block, AdversarialCopier()).read(0, torch.zeros(0, dtype=torch.uint8)).wait()
    DirectReads(block).read(0, torch.zeros(0, dtype=torch.uint8)).wait()
