"""Tests that each row of docs/your_data.md names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "your_data.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not re.fullmatch(r"\|( your [^|]*)\|.*", line)
]


def test_there_are_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_its_test(row: str) -> None:
    file, name = re.findall(r"`([\w/]+\.py)::(\w+)` \|$", row)[0]
    module = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {each.name for each in module.body if isinstance(each, ast.FunctionDef)}
