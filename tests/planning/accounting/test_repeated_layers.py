"""Layers added to a simulation's history, compared with simulations of all layers."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt.planning.accounting.allocation_log import AllocationHistory
from hf_memopt.planning.accounting.repeated_layers import Layers, NotRepeatedError, add_groups, growth
from hf_memopt.planning.estimate import _run
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated

LAYERS = Layers("layers", 9)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


class Stack(nn.Module):
    """Blocks with recurring widths, between two layers of another kind."""

    def __init__(self, num_layers: int, widths: tuple[int, ...] = (256,), recompute: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(32, 64)
        self.layers = nn.ModuleList(Block(widths[number % len(widths)]) for number in range(num_layers))
        self.after = nn.Linear(64, 32)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.after(x)


class Uneven(Stack):
    """Blocks that each keep more than the block before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for number, layer in enumerate(self.layers):
            x = layer(x.repeat(number + 1, 1))[: len(x)]
        return self.after(x)


class Crossing(Stack):
    """Work between the blocks that belongs to no block."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.before(x)
        for layer in self.layers:
            x = layer(x * first)
        return self.after(x)


def history(build: Callable[[], nn.Module], optimizer: Callable[..., Any] = torch.optim.AdamW) -> AllocationHistory:
    """Return the history of two steps with a norm over all weights, whose size depends on their number."""

    def setup(device: torch.device) -> Any:
        with device:
            model = build()
            return model, optimizer(model.parameters()), torch.zeros(16, 32)

    def step(state: Any) -> None:
        model, update, x = state
        with torch.autocast("virtualcuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()

    return run_isolated(lambda: _run(SimulatedStep(setup, step), None).history)


def plain(found: AllocationHistory) -> Any:
    """Return a history without its hints at places and sources, which may differ."""
    records = [{**asdict(each), "source": None} for each in found.records]
    return records, [change[:3] for change in found.changes], found.backwards, found.step_begins


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (Stack, LAYERS),
        (partial(Stack, recompute=True), LAYERS),
        (partial(Stack, widths=(256, 128)), Layers("layers", 13, period=2)),
    ],
    ids=["kept", "checkpointed", "every second one alike"],
)
def test_added_layers_are_those_of_a_larger_model(build: Callable[[int], nn.Module], layers: Layers) -> None:
    few = 3 * layers.period + layers.count % layers.period
    shorter, longer, whole = (history(partial(build, count)) for count in (few, few + layers.period, layers.count))
    each_adds = growth(shorter, longer, layers)
    assert each_adds, "norms of all weights are not seen to grow"
    num_more = (layers.count - few) // layers.period - 1
    assert plain(add_groups(longer, layers, num_more, each_adds)) == plain(whole)
    assert plain(add_groups(longer, layers, num_more)) != plain(whole)


def test_nothing_added_changes_nothing() -> None:
    found = history(partial(Stack, 3))
    assert plain(add_groups(found, LAYERS, 0)) == plain(found)


@pytest.mark.parametrize("build", [Uneven, Crossing], ids=["each does more", "work between the layers"])
def test_layers_that_are_not_repeated_are_refused(build: Callable[[int], nn.Module]) -> None:
    shorter, longer = (history(partial(build, count)) for count in (3, 4))
    with pytest.raises(NotRepeatedError, match=r"no order|expected"):
        growth(shorter, longer, LAYERS)


def test_a_history_of_another_model_is_refused() -> None:
    shorter, longer = history(partial(Stack, 3)), history(partial(Stack, 4, widths=(512,)), torch.optim.SGD)
    with pytest.raises(NotRepeatedError, match="changes where"):
        growth(shorter, longer, LAYERS)
    with pytest.raises(NotRepeatedError, match="no order"):
        add_groups(history(partial(Stack, 2)), LAYERS, 1)


def test_places_are_found_and_renamed() -> None:
    layers = Layers("model.layers", 12, period=2)
    assert layers.group_of("base.model.layers.7.mlp") == layers.group_of("model.layers.6") == 3
    assert layers.group_of("model.layers") is layers.group_of("model.layers.norm") is None
    assert layers.group_of("submodel.layers.3") is None
    assert layers.renamed("base.model.layers.7.mlp.layers.1", 2) == "base.model.layers.11.mlp.layers.1"
