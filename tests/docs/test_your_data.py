"""Tests that each row of docs/your_data.md and docs/SECURITY.md names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for page in ("your_data.md", "SECURITY.md")
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not re.fullmatch(r"\|( your [^|]*| reader )\|.*", line)
]


def test_there_are_rows() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_its_tests(row: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`(?=, `| \|$)", row)
    assert named
    for file, name in named:
        module = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {each.name for each in module.body if isinstance(each, ast.FunctionDef)}
