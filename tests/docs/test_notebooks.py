"""Notebooks at toy size: their code cells one after the other, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
SHOWN = {
    "plan_and_train": "by the plan",
    "smolvla_in_one_step": "smolvla takes 1 Euler step",
}
SLOW = {"smolvla_in_one_step"}


def cells(name: str, kind: str) -> list[Any]:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_each_is_run_below() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_it_explains_itself_and_brings_no_outputs(name: str) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(name, "code"))
    assert cells(name, "markdown")[0]["source"][0].startswith("# ")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SHOWN]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells(name, "code")))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert SHOWN[name] in done.stdout
