"""Tests of one budget for several backwards and contexts: predictions equal measurements to the byte."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations import InfeasibleBudgetError

pytestmark = pytest.mark.usefixtures("quick_plans")

NUM_STEPS, WIDTH, BATCH = 9, 16, 32
Step = Callable[[nn.Module, ActivationOffloader], None]


class Scales(nn.Module):
    """A model of several scales, with a main head on each, and a probe that sends no gradient back."""

    def __init__(self, num_scales: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_scales))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(num_scales))
        self.probes = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(num_scales))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main, probe = [], []
        for scale, head, of_probe in zip(self.scales, self.heads, self.probes, strict=True):
            x = scale(x)
            main.append(head(x).square().mean())
            probe.append(of_probe(x.detach()).square().mean())
        return torch.stack(main).sum(), torch.stack(probe).sum()


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def two_backwards(model: nn.Module, offloader: ActivationOffloader) -> None:
    with offloader.offload_context(model):
        main, probe = model(batch())
    main.backward()
    probe.backward()


def two_backwards_inside(model: nn.Module, offloader: ActivationOffloader) -> None:
    with offloader.offload_context(model):
        main, probe = model(batch())
        probe.backward()
        main.backward()


def retained(model: nn.Module, offloader: ActivationOffloader) -> None:
    with offloader.offload_context(model):
        main, probe = model(batch())
    main.backward(retain_graph=True)
    (main + probe).backward()


def several_contexts(number: int, models: Callable[[nn.Module], Iterator[nn.Module | None]]) -> Step:
    def step(model: nn.Module, offloader: ActivationOffloader) -> None:
        losses = []
        for _, of_context in zip(range(number), models(model), strict=False):
            with offloader.offload_context(of_context):
                losses.append(model(batch()).square().mean())
        torch.stack(losses).sum().backward()

    return step


def the_same(model: nn.Module) -> Iterator[nn.Module | None]:
    while True:
        yield model


def its_layers(model: nn.Module) -> Iterator[nn.Module | None]:
    while True:
        yield from model.children()


def wrapped_layers(model: nn.Module, offloader: ActivationOffloader) -> None:
    """Run each layer in a context of its own."""
    handles = [offloader.wrap(layer) for layer in model.children()]
    model(batch()).square().mean().backward()
    for handle in handles:
        handle.remove()


def adapted_in_an_inner_loop(model: nn.Module, offloader: ActivationOffloader) -> None:
    """Take inner steps as MAML: gradients with a graph, and another forward with the updated weights."""
    with offloader.offload_context(model):
        weights: dict[str, Any] = dict(model.named_parameters())
        for _ in range(2):
            loss = functional_call(model, weights, (batch(),)).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {key: value - 0.1 * g for (key, value), g in zip(weights.items(), gradients, strict=True)}
        loss = functional_call(model, weights, (batch(),)).square().mean()
    loss.backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    **{f"two backwards, {number} scales": (lambda n=number: Scales(n), two_backwards) for number in (2, 4, 8)},
    "two backwards inside": (lambda: Scales(4), two_backwards_inside),
    "retained": (lambda: Scales(4), retained),
    "one context": (chain, several_contexts(1, the_same)),
    "two contexts": (chain, several_contexts(2, the_same)),
    "four contexts": (chain, several_contexts(4, the_same)),
    "contexts of layers": (chain, several_contexts(3, its_layers)),
    "wrapped layers": (chain, wrapped_layers),
    "inner loop": (chain, adapted_in_an_inner_loop),
}


def train(case: str, budget_gib: float) -> ActivationOffloader:
    torch.manual_seed(0)
    make_model, step = CASES[case]
    model = make_model()
    offloader = ActivationOffloader(budget_gib=budget_gib, offload_threshold_mb=0.001, copier=SyncCopier())
    for _ in range(NUM_STEPS):
        step(model, offloader)
        model.zero_grad()
    return offloader


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(share=0.15)
def test_predicted_is_measured_within_the_budget(case: str, share: float) -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        train(case, 1e-9)
    budget_gib = share * refused.value.smallest_bytes / 2**30
    stats = train(case, budget_gib).stats
    assert stats.measured_peak_gib == stats.predicted_peak_gib
    assert stats.measured_peak_gib is not None
    assert 0 < stats.measured_peak_gib <= budget_gib


def test_passes_that_overlap_otherwise_keep_to_the_budget_in_the_end() -> None:
    """Run a pipeline, in which the next forward comes before the previous backward."""
    torch.manual_seed(0)
    model = chain()

    def run(budget_gib: float, num_steps: int = 12) -> float:
        offloader = ActivationOffloader(budget_gib=budget_gib, offload_threshold_mb=0.001, copier=SyncCopier())
        waiting: list[Tensor] = []
        for _ in range(num_steps):
            for _ in range(2 - len(waiting)):
                with offloader.offload_context(model):
                    waiting.append(model(batch()).square().mean())
            waiting.pop(0).backward()
        measured = offloader.stats.measured_peak_gib
        assert measured is not None
        return measured

    with pytest.raises(InfeasibleBudgetError) as refused:
        run(1e-9)
    smallest_gib = refused.value.smallest_bytes / 2**30
    for share in (1.0, 1.5, 3.0):
        try:
            assert run(share * smallest_gib) <= share * smallest_gib
        except InfeasibleBudgetError as error:
            assert error.smallest_bytes > share * refused.value.smallest_bytes  # noqa: PT017
