"""Names the modules that rely on a canary's assertions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INTEGRATION = "hf_memopt/lerobot"
PREFIX = f"{INTEGRATION}/flow/smolvla_flow.py"
MODELING = f"{INTEGRATION}/modeling_smolvla_reflow.py"
PI0 = f"{INTEGRATION}/flow/pi0_flow.py"
PI0_MODELING = f"{INTEGRATION}/pi0/modeling_pi0_reflow.py"
TEACHER = f"{INTEGRATION}/reflow/teachers.py"
CHECKPOINT_FILES = f"{INTEGRATION}/files/checkpoint_files.py"
PROCESSORS = f"{INTEGRATION}/files/checkpoint_files.py"
CHECKPOINTS = f"{INTEGRATION}/files/policy_files.py"
RECIPE = "recipes/reflow_smolvla.py"
LOOP = "recipes/reflow/lerobot_loop.py"


@contextmanager
def relied_on_by(module: str) -> Iterator[None]:
    """Make any exception inside name `module`."""
    assert (Path(__file__).parents[2] / module.split()[0]).exists()
    try:
        yield
    except Exception as error:
        pytest.fail(f"{module} relies on what has changed here: {type(error).__name__}: {error}")
