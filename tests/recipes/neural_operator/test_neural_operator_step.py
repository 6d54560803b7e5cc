import pytest
import torch
from late_imports import LateModule
from torch import Tensor, nn

step = LateModule("hf_memopt.recipes.neural_operator.step")


def test_losses_do_not_take_fields_for_periodic() -> None:
    x = torch.linspace(0, 1, 17)[None, None, :, None].expand(1, 1, 17, 17)
    assert step.relative_errors(2)["h1"](x * 1.1, x).item() == pytest.approx(0.1, rel=1e-4)
    shifted = step.relative_errors(2)["h1"](x + 0.1, x).item()  # a constant has no gradient
    gradient = 17 / 16  # neuralop uses 1 / n as the spacing of n nodes
    assert shifted == pytest.approx(0.1 / (gradient**2 + (x**2).mean().item()) ** 0.5, rel=1e-4)


class Spectral(nn.Module):
    """A complex weight beside real ones, one of them without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.weight).abs().square().sum()


def trained(scaler: torch.amp.GradScaler | None, num_updates: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(num_updates):
        loss = model(torch.full((4,), float(number + 1)))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return list(model.parameters())


def test_scaled_updates_are_those_without_scaling() -> None:
    """Scales are powers of two, so that scaling and unscaling round nothing."""
    scaler = step.ComplexGradScaler("cpu", init_scale=2.0**10)
    assert all(map(torch.equal, trained(scaler), trained(None)))


def test_torchs_own_scaler_cannot_do_this() -> None:
    with pytest.raises(NotImplementedError, match="ComplexFloat"):
        trained(torch.amp.GradScaler("cpu"))


def test_an_infinite_complex_gradient_skips_the_update_and_lowers_the_scale() -> None:
    scaler = step.ComplexGradScaler("cpu", init_scale=1024.0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.weight.detach().clone()
    scaler.scale(model.weight.abs().sum() * 3e38).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 512.0
