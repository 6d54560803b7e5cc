"""Tests of plans in passes that save as much as the planned pass but run other operations."""

import pytest
import torch
from as_plain import MODES, Context, assert_as_plain, plain
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


class Kinds(nn.Module):
    """A model that computes tensors of the same sizes in several ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: Tensor, kind: int) -> Tensor:
        x = self.first(batch)
        copied = (x.clone(), x.relu(), x.tanh(), x.exp())[kind % 4] * self.scale
        # Saves x before or after the in-place change; autograd allows both.
        rest = torch.sin(x) if kind < 4 else torch.sigmoid_(x)
        return self.last(copied + rest).square().mean()


class Packed(nn.Module):
    """A model of two kinds of recurrent layers over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, batch: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(batch, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.gru(self.lstm(packed)[0])[0], batch_first=True)
        return padded.square().mean()


def step(kinds: list[int]):
    def run(model: nn.Module, context: Context, number: int) -> Tensor:
        batch = torch.randn(5, WIDTH)
        with context(model):
            loss = model(batch, kinds[number])
        loss.backward()
        return loss.detach()

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", [[0, 0, 0, 4, 0, 4], [1, 1, 1, 5, 5, 5], [2, 2, 2, 1, 7, 3], [4, 4, 0, 4, 6, 0]])
def test_another_operation_in_the_place_of_the_recorded_one(kinds: list[int], mode: str) -> None:
    assert_as_plain(step(kinds), Kinds(), mode)


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_of_changing_lengths(mode: str) -> None:
    def run(model: nn.Module, context: Context, number: int) -> Tensor:
        lengths = torch.randint(1, 6, (4,)).tolist()
        with context(model):
            loss = model(torch.randn(4, max(lengths), WIDTH), lengths)
        loss.backward()
        return loss.detach()

    assert_as_plain(run, Packed(), mode)


class Wave(nn.Module):
    """A model that saves its input, and the sine or the cosine of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: Tensor, kind: int) -> Tensor:
        x = self.first(batch)
        return ((x.sin(), x.cos())[kind] * self.scale).mean()


def test_a_pass_with_other_operations_is_recorded_again() -> None:
    """Check that the first other pass copies the storages to be recomputed, and that the next plan fits."""
    recomputed: list[int] = []

    def run(model: nn.Module, context: Context, number: int) -> Tensor:
        loss = step([0, 0, 0, 1, 1, 1])(model, context, number)
        if context is not plain:
            recomputed.append(context.__self__.stats.bytes_recomputed - sum(recomputed))
        return loss

    assert_as_plain(run, Wave(), "recompute", budget_gib=1024.0)
    assert recomputed[2] > 0
    assert recomputed[3] < recomputed[2]
    assert recomputed[5] == recomputed[2]
