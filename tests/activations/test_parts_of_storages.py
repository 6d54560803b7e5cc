"""Tests that saved parts of larger storages are copied at most once, and only if a copy frees memory."""

from typing import Any

import pytest
import torch
from as_plain import MODES, Context, assert_as_plain
from gradients import equal, take_gradients
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier


def make(**options: Any) -> ActivationOffloader:
    return ActivationOffloader(**{"offload_threshold_mb": 0, "mode": "all", "copier": SyncCopier(), **options})


class Part(nn.Module):
    """A model that makes `(8, 8)` of its batch, and saves parts of the result at different times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        gate, value = x.chunk(2, 1)
        gated = nn.functional.silu(gate)  # saves one half; the next line saves the other half
        return self.last(torch.cat([gated * value.sin(), value * gated.cos()], 1)).square().mean()


def step(model: nn.Module, context: Context, number: int) -> Tensor:
    with context(model):
        loss = model(torch.randn(8, 8))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("mode", MODES)
def test_halves_that_are_saved_apart(mode: str) -> None:
    assert_as_plain(step, Part(), mode)


def test_a_storage_of_which_halves_are_saved_is_copied_once() -> None:
    model, offloader = Part(), make()
    step(model, offloader.offload_context, 0)
    # The batch, the linear layer's result once for both halves, both activations, two cosines' operands, their
    # products, and the last layer's result.
    x = torch.randn(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        seen: list[Tensor] = []
        model(x)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in seen}
    unique = sum(size for key, size in sizes.items() if key not in weights)
    assert 0 < offloader.stats.bytes_moved <= unique


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_to_a_part_that_was_not_shown_yet(mode: str) -> None:
    """Check a buffer that is filled column by column, unseen by autograd."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, batch: Tensor) -> Tensor:
            columns, x = torch.zeros(4, 6, len(self.layers)), batch
            for place, layer in enumerate(self.layers):
                columns.data[..., place] = torch.tanh(layer(x)).data
                # Saves the columns filled so far, and the earlier columns once more.
                x = layer(x) + (columns[..., : place + 1] * layer.bias[:, None]).sum(-1)
            return x.square().mean()

    def fill(model: nn.Module, context: Context, number: int) -> Tensor:
        with context(model):
            loss = model(torch.randn(4, 6))
        loss.backward()
        return loss.detach()

    assert_as_plain(fill, Filled(), mode)


class Rows(nn.Module):
    """A model that saves a few rows, or parts of rows, of results that are dropped before backward."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.columns = nn.Linear(8, 8), columns
        self.scale = nn.Parameter(torch.randn(8)[columns])

    def forward(self, batch: Tensor) -> Tensor:
        rows = self.first(batch)[2:5, self.columns]
        return (rows * self.scale).square().mean()


COLUMNS = pytest.mark.parametrize("columns", [slice(None), slice(1, 3)])


@COLUMNS
@pytest.mark.parametrize("copier", ["early", "late", "random"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_what_the_model_lets_go_of(mode: str, copier: str, columns: slice) -> None:
    assert_as_plain(step, Rows(columns), mode, copier)


@COLUMNS
def test_of_what_the_model_lets_go_of_only_the_saved_part_is_copied(columns: slice) -> None:
    model, offloader = Rows(columns), make()
    step(model, offloader.offload_context, 0)
    # The whole batch, the layer's result from the first to the last saved element, and the squares.
    num_elements = 8 * 8 + (3 * 8 if columns == slice(None) else 2 * 8 + 2) + 3 * len(model.scale)
    assert offloader.stats.bytes_moved == 4 * num_elements
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_slices_of_a_lasting_data_set_stay_where_they_are(mode: str) -> None:
    data = torch.randn(1000, 8)
    model, offloader = nn.Linear(8, 8), make(mode=mode)
    for number in range(5):
        batch = data[10 * number : 10 * number + 10]
        model(batch).square().mean().backward()
        want = take_gradients(model)
        with offloader.offload_context(model):
            loss = model(batch).square().mean()
        loss.backward()
        assert equal(take_gradients(model), want)
    stats = offloader.stats
    assert stats.bytes_moved <= 5 * 10 * 8 * 4  # the layer's results
    assert stats.host_bytes_pinned < data.nbytes
    assert stats.measured_peak_gib is not None
    assert stats.measured_peak_gib * 2**30 <= 2 * 10 * 8 * 4


def test_a_budget_is_for_what_goes_with_the_step() -> None:
    """Check that a data set and results kept beyond the step do not count."""
    data, model = torch.randn(1000, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    offloader = make(mode="auto", budget_gib=2 * 10 * 8 * 4 / 2**30)
    for number in range(6):
        with offloader.offload_context(model):
            kept = model[1](model[0](data[10 * number : 10 * number + 10]))
            loss = model[2](kept).square().mean()
        loss.backward()
    assert offloader.stats.predicted_peak_gib == offloader.stats.measured_peak_gib


def test_what_ceases_to_last_is_counted_from_then_on() -> None:
    """Keep a result in some passes, and drop it in later passes."""
    model, offloader = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), make(mode="auto", max_slowdown=1e9)
    for number in range(8):
        x = torch.randn(4, 8)
        model(x).sin().square().mean().backward()
        want = take_gradients(model)
        with offloader.offload_context(model):
            result = model(x)
            loss = result.sin().square().mean()
            if number > 3:
                del result
        loss.backward()
        assert equal(take_gradients(model), want)
