"""Fixtures of the tests of checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last state of a run that neither saves nor stops."""
    run = ToyRun(tmp_path_factory.mktemp("uninterrupted"))
    run.train()
    return run.state()


@pytest.fixture
def folder(saved: ToyRun) -> Path:
    """The folder of the checkpoints of `saved`."""
    return saved.checkpoints.folder
