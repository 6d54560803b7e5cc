"""Host and disk below a card, read from texts."""

import pytest

from hf_memopt.planning.cards.memory_below import DEFAULT_BYTES_PER_S, Disk, MemoryBelow, find_memory_below
from hf_memopt.units import GIB


def test_a_disk_has_a_size_and_a_speed() -> None:
    assert find_memory_below("32GiB", "500GiB@5GBps") == MemoryBelow(32 * GIB, Disk(500 * GIB, 5e9))
    assert find_memory_below("32GiB", "500GiB") == MemoryBelow(32 * GIB, Disk(500 * GIB, DEFAULT_BYTES_PER_S))
    assert find_memory_below("32GiB") == MemoryBelow(32 * GIB, None)
    assert find_memory_below() == MemoryBelow(None, None)


@pytest.mark.parametrize("text", ["5@x", "5GiB@", "@5GBps", "much", "", "500GiB@0GBps"])
def test_a_text_that_is_no_disk_is_named_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"^disk='.*' is neither a size such as 500GiB nor .* 500GiB@5GBps$"):
        find_memory_below("32GiB", text)


def test_a_disk_needs_the_hosts_limit() -> None:
    with pytest.raises(ValueError, match="say how much it has, such as host=32GiB"):
        find_memory_below(None, "500GiB")
    assert find_memory_below(None, "500GiB", needs_no_host=True).disk == Disk(500 * GIB)


def test_any_number_of_bytes_is_held_without_a_limit() -> None:
    assert MemoryBelow().holds(2**60)
    assert MemoryBelow(5).holds(5)
    assert not MemoryBelow(5).holds(6)
