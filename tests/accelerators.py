"""Accelerate keeps its settings for the whole process; tests begin without those of others."""

from accelerate.state import AcceleratorState, GradientState


def forget_accelerator() -> None:
    """Let the next `Accelerator` choose for itself."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
