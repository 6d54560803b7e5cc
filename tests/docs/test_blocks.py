"""All Python blocks of the README and the documentation, run with their own imports."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, PartialState
from docs_blocks import blocks, given, run_block

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Blocks that take minutes, by a line of theirs.
SLOW = ('plan(workload("recipes/configs/lgt.json")',)


def cases() -> list[Any]:
    found = []
    for file in FILES:
        for line, text in blocks(file):
            marks = [pytest.mark.slow] if any(each in text for each in SLOW) else []
            found.append(pytest.param(file.stem, text, id=f"{file.stem}-{line}", marks=marks))
    return found


def test_there_are_blocks() -> None:
    assert len(cases()) > 30


def test_a_name_without_an_import_is_noticed() -> None:
    text = "import torch\nmodel = prepare(model)\nfor batch in batches:\n    loss = torch.sum(batch)\n"
    assert given(text) == {"prepare", "model", "batches"}


# neuralop's own Trainer passes the whole sample to its own model and loss, which take less.
@pytest.mark.filterwarnings("ignore:.* received unexpected keyword arguments:UserWarning")
@pytest.mark.parametrize(("page", "text"), cases())
def test_it_runs(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PartialState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    run_block(page, text)
