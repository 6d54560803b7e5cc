"""Cards by name and by size, and what they keep for themselves."""

import pytest

from hf_memopt.estimate.gpus import CARDS, GIB, MIB, allowances, find_card, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 * GIB), ("24 GB", 24 * 10**9), ("500mb", 500 * 10**6), ("12GBps", 12 * 10**9), ("1.5gib", 1.5 * GIB)],
)
def test_sizes_are_read(text: str, num_bytes: float) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "8 elephants", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_cards_are_found_by_name_and_by_size() -> None:
    assert find_card("RTX4070-laptop") is CARDS["rtx4070-laptop"]
    assert find_card("8GiB").memory_bytes == 8 * GIB
    assert find_card("h100", 12 * 10**9).link_bytes_per_s == 12 * 10**9
    with pytest.raises(ValueError, match=r"gpu='rtx9999' is neither a size .* known are t4, "):
        find_card("rtx9999")


def test_cards_with_larger_workspaces_keep_more_for_themselves() -> None:
    ampere, hopper = (sum(allowances(CARDS[name]).values()) for name in ("a100-80gb", "h100"))
    assert hopper - ampere == 2 * (32 * MIB - 8320 * 1024)
    assert sum(allowances().values()) == ampere


def test_a_card_of_ones_own_is_taken_as_it_is_but_for_another_link() -> None:
    card = CARDS["h100"]
    assert find_card(card) is card
    assert find_card(card, 10**9).link_bytes_per_s == 10**9
