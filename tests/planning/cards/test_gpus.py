"""Cards by name and by size, and their reserved memory."""

import pytest

from hf_memopt.planning.cards.gpus import (
    _SOLD_WITH_GB,
    CARDS,
    allowances,
    cublas_workspace_bytes,
    find_card,
)
from hf_memopt.units import GIB, MIB


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX4070-laptop", "rtx4070-laptop"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "rtx4070-laptop"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("3060", "rtx3060-12gb"),
        ("rtx 4060 ti", "rtx4060ti-8gb"),
        ("RTX 4060 Ti 16GB", "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("AMD Instinct MI300X", "mi300x"),
        ("H20", "h20"),
        ("A100", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla T4", "t4"),
    ],
)
def test_cards_are_found_however_they_are_written(written: str, name: str) -> None:
    assert find_card(written) is CARDS[name]


def test_a_size_has_the_speed_of_a_desktop_card_or_of_the_one_that_is_named() -> None:
    assert find_card("8GiB").memory_bytes == 8 * GIB
    assert find_card("8GiB").half_flops == CARDS["rtx4070"].half_flops
    large = find_card("48GiB@h100")
    assert (large.name, large.memory_bytes) == ("48GiB@h100", 48 * GIB)
    assert (large.half_flops, large.compute_capability) == (CARDS["h100"].half_flops, (9, 0))
    assert find_card("h100", link="12GBps").link_bytes_per_s == 12 * 10**9


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("8GB", "rtx4060"),
        ("12GB", "rtx4070"),
        ("16gb", "rtx4080"),
        ("24 GB", "rtx4090"),
        ("48GB@l4", "a6000"),
        ("80G", "a100-80gb"),
    ],
)
def test_a_size_in_gigabytes_is_the_card_sold_under_it(size: str, name: str) -> None:
    assert find_card(size).memory_bytes == CARDS[name].memory_bytes


def test_other_sizes_have_the_share_that_cards_report_at_least() -> None:
    assert 0.95 * 20 * GIB < find_card("20GB").memory_bytes < 20 * GIB
    assert all(1e9 * size < CARDS[name].memory_bytes < size * GIB for size, name in _SOLD_WITH_GB.items())


def test_only_a_named_card_has_a_speed() -> None:
    assert [find_card(text).is_named for text in ("8GiB", "24GB", "24GB@l4", "4090")] == [False, False, True, True]


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("rtx4050", "rtx4060"),
        ("rtx5060", "rtx5070"),
        ("RTX 3080 Ti", "rtx3080-10gb"),
        ("gtx1080ti", "rtx2080ti"),
        ("h800", "h100"),
        ("A800 80GB", "a100-80gb"),
        ("b300", "b200"),
        ("48GB@l20", "l40s"),
    ],
)
def test_the_nearest_card_is_of_the_same_series(unknown: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"the nearest is {nearest}; known are"):
        find_card(unknown)


def test_reserved_memory_is_an_allowance() -> None:
    card = find_card("t4", reserve="1GiB")
    assert allowances(card) == allowances(CARDS["t4"]) | {"other programs": GIB}
    assert card.memory_bytes == CARDS["t4"].memory_bytes


@pytest.mark.parametrize(
    "text",
    [
        "rtx9999",
        "24",
        "100",
        "48GiB@rtx9999",
        "NVIDIA GH200 480GB",
        "RTX 4070 Ti",
        "H100 94GB",
        "h100@48GiB",
        "@h100",
        "24@h100",
        "",
    ],
)
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpu=.* is neither a size with its unit .* known are v100-16gb, "):
        find_card(text)


def test_cards_have_what_cuda_reports_and_not_what_is_advertised() -> None:
    advertised = {"l4": 24, "a10": 24, "h200": 141, "h100": 80, "rtx4090": 24, "t4": 16, "b200": 192}
    for name, gigabytes in advertised.items():
        assert 0.9 * gigabytes < CARDS[name].memory_bytes / GIB < gigabytes


def test_cards_with_larger_workspaces_are_known() -> None:
    ampere, hopper = (cublas_workspace_bytes(CARDS[name].compute_capability) for name in ("a100-80gb", "h100"))
    assert (ampere, hopper) == (8320 * 1024, 32 * MIB)


def test_the_context_is_that_of_the_card_where_it_was_measured() -> None:
    assert allowances(CARDS["t4"])["device context"] == 141 * MIB
    assert allowances(CARDS["h100"]) == allowances()
    assert allowances(find_card("16GiB@t4")) == allowances()


def test_a_card_of_ones_own_is_taken_as_it_is_but_for_another_link() -> None:
    card = CARDS["h100"]
    assert find_card(card) is card
    assert find_card(card, link="1GBps").link_bytes_per_s == 10**9
