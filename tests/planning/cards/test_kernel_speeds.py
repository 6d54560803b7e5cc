"""Speeds of cards, and the stated range of times."""

from dataclasses import replace

import pytest

from hf_memopt.planning.cards.gpus import CARDS, family_of, speeds_of, time_range


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("v100-16gb", "V100"),
        ("t4", "Turing"),
        ("a100-80gb", "A100"),
        ("a10", "Ampere and Ada, workstation"),
        ("l40s", "Ampere and Ada, workstation"),
        ("a10g", "Ampere and Ada, GeForce"),
        ("rtx3090", "Ampere and Ada, GeForce"),
        ("rtx4070-laptop", "Ampere and Ada, GeForce"),
        ("h200", "Hopper"),
        ("rtx5090", None),
        ("b200", None),
    ],
)
def test_cards_belong_to_families_by_their_tensor_cores(name: str, family: str | None) -> None:
    assert family_of(CARDS[name]) == family


def test_all_shares_are_sensible() -> None:
    for card in CARDS.values():
        assert all(0.3 < share < 1.1 for share in speeds_of(card)), card.name


def test_a_card_of_no_family_has_the_speeds_of_all_and_a_wider_range() -> None:
    new = replace(CARDS["rtx4090"], compute_capability=(13, 0))
    assert speeds_of(new) == speeds_of(CARDS["b200"]) != speeds_of(CARDS["rtx4090"])
    known, unknown = time_range(CARDS["rtx4090"]), time_range(new)
    assert unknown.low < known.low < 1 < known.high <= unknown.high
