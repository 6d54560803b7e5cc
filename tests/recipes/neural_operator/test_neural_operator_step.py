import pytest
import torch
from late_imports import LateModule

step = LateModule("hf_memopt.recipes.neural_operator.step")


def test_losses_do_not_take_fields_for_periodic() -> None:
    x = torch.linspace(0, 1, 17)[None, None, :, None].expand(1, 1, 17, 17)
    assert step.relative_errors(2)["h1"](x * 1.1, x).item() == pytest.approx(0.1, rel=1e-4)
    shifted = step.relative_errors(2)["h1"](x + 0.1, x).item()  # a constant has no gradient
    gradient = 17 / 16  # neuralop uses 1 / n as the spacing of n nodes
    assert shifted == pytest.approx(0.1 / (gradient**2 + (x**2).mean().item()) ** 0.5, rel=1e-4)
