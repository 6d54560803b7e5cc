import pytest

from hf_memopt.text_table import Table, align


def test_words_stand_left_and_numbers_right() -> None:
    table = Table(["mode", "MiB", "losses"], [["off", 1234.5, "reference"], ["auto", None, "equal"], ["x", 7, ""]])
    assert str(table) == ("mode      MiB  losses\noff   1,234.5  reference\nauto        -  equal\nx           7")


def test_floats_have_the_digits_of_the_table() -> None:
    assert Table(["GiB"], [[0.12345]], digits=3).texts() == [["0.123"]]
    assert Table(["GiB"], []).lines() == ["GiB"]


@pytest.mark.parametrize(
    ("sides", "separator", "lines"),
    [("<", "  ", ["a   bb", "cc  d"]), (">", "  ", [" a  bb", "cc   d"]), ("<>", " | ", ["a  | bb", "cc |  d"])],
)
def test_columns_are_aligned_to_their_sides(sides: str, separator: str, lines: list[str]) -> None:
    assert align([["a", "bb"], ["cc", "d"]], sides, separator) == lines
