"""Tests that numbers outside their range are refused by name, value and reason."""

import pytest

from hf_memopt.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range


@pytest.mark.parametrize(
    ("allowed", "value", "complaint"),
    [
        (COUNT, 0, "must be at least 1"),
        (COUNT, 1.5, "must be a whole number"),
        (COUNT, 2**62, "must be at most 2147483647"),
        (COUNT, "3", "must be a whole number"),
        (NOT_NEGATIVE, -0.5, "must be at least 0"),
        (NOT_NEGATIVE, float("nan"), "must be a finite number"),
        (NOT_NEGATIVE, float("inf"), "must be a finite number"),
        (POSITIVE, 0, "must be above 0"),
        (SHARE, 1, "must be less than 1"),
        (SEED, -1, "must be at least 0"),
        (SEED, 2**70, "must be at most 4294967295"),
        (Range(above=0, why="; None does not clip"), -1, "must be above 0; None does not clip"),
    ],
)
def test_a_range_names_option_value_and_bound(allowed: Range, value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^option={value!r} {complaint}$"):
        allowed.check("option", value)


@pytest.mark.parametrize(
    ("allowed", "value"),
    [(COUNT, 1), (COUNT, None), (NOT_NEGATIVE, 0), (NOT_NEGATIVE, 10**400), (SHARE, 0.999), (SEED, 2**32 - 1)],
)
def test_a_range_takes_what_is_in_it(allowed: Range, value: object) -> None:
    allowed.check("option", value)
