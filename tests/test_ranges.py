"""Tests that numbers outside their range are refused by name, value and reason."""

from typing import Any

import pytest

from hf_memopt.ranges import COUNT, SHARE, Range


@pytest.mark.parametrize(
    ("allowed", "value", "complaint"),
    [
        (COUNT, 1.5, "must be a whole number"),
        (COUNT, 0, "must be at least 1"),
        (SHARE, 1.0, "must be less than 1"),
        (SHARE, float("nan"), "must be a finite number"),
        (Range(above=0, why="; use 1"), 0, "must be above 0; use 1"),
    ],
)
def test_a_number_outside_is_refused(allowed: Range, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"^x={value} {complaint}$"):
        allowed.check("x", value)


@pytest.mark.parametrize(("allowed", "value"), [(COUNT, 1), (SHARE, 0.0), (SHARE, 0.999), (COUNT, None)])
def test_a_number_inside_is_taken(allowed: Range, value: Any) -> None:
    allowed.check("x", value)
