"""What the tests of checkpoints share."""

from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state in which a run ends that neither saves nor stops."""
    run = ToyRun(tmp_path_factory.mktemp("uninterrupted"))
    run.train()
    return run.state()


@pytest.fixture
def folder(saved: ToyRun) -> Path:
    """Where `saved` has its checkpoints."""
    return saved.checkpoints.folder
