import pytest

from hf_memopt.units import GIB, MIB, format_bytes, format_gib, format_ms, parse_size


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
