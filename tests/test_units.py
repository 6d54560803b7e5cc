import pytest

from hf_memopt.units import GIB, MIB, format_bytes, format_gib, format_ms


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (MIB - 1, "1024.00 KiB"), (1.5 * MIB, "1.50 MiB")],
)
def test_bytes_are_shown_in_their_largest_unit(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_gib_are_shown_however_few() -> None:
    assert format_gib(GIB // 20) == "0.05 GiB"


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0.42, "0.4 ms"), (31.4, "31 ms"), (1688, "1.69 s"), (123456, "123 s")]
)
def test_times_have_the_digits_that_count(milliseconds: float, text: str) -> None:
    assert format_ms(milliseconds) == text
