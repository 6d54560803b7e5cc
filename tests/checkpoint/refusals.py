"""A check that a checkpoint is refused."""

from pathlib import Path

import pytest
from toy_run import ToyRun


def assert_refused(run: ToyRun, name: str | Path, message: str) -> None:
    """Expect one line of this pattern, with nothing loaded."""
    before = run.state()
    with pytest.raises(ValueError, match=message) as refused:
        run.resume(name)
    assert "\n" not in str(refused.value)
    assert run.state() == before
