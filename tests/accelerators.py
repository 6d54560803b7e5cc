"""Accelerate keeps its settings for the whole process; tests begin without those of others."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from accelerate.state import AcceleratorState, GradientState


def forget_accelerator() -> None:
    """Let the next `Accelerator` choose for itself."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Also on a machine with a GPU, and with settings of its own."""
    forget_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield
    forget_accelerator()
