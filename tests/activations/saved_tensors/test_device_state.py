"""Tests of the passes' shared queue of copies, and of the device memory that reloads go to."""

import pytest
import torch
from as_plain import MODES, Context, plain, planned, results, same
from device_states import above_host
from torch import nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes, DeviceState
from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.lower_memory import Place


def test_memory_counts_until_the_node_that_reads_it_last_is_done() -> None:
    held = DeviceBytes()
    held.add(8)
    seen = []

    def give_up(gradient: torch.Tensor) -> None:
        held.remove_after_node(8)
        held.settle()
        seen.append(held.now_bytes)

    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(give_up)
    y.sum().backward()
    held.settle()
    assert (seen, held.now_bytes, held.peak_bytes) == ([8], 0, 8)


class Storage:
    """A stand-in for a storage on its way down."""

    def __init__(self, context: DeviceState, num_bytes: int) -> None:
        self.context, self.num_bytes, self.is_leaving = context, num_bytes, False

    def let_go(self) -> None:
        self.context.stay(self)


def test_the_oldest_copies_give_up_their_memory_first() -> None:
    context = above_host()
    storages = [Storage(context, num_bytes) for num_bytes in (4, 4, 8)]
    for storage in storages:
        context.leave(storage, in_flight_bytes=8)
    assert [storage.is_leaving for storage in storages] == [False, False, True]
    context.stay(storages[2])
    assert not context.let_all_go()


def test_a_kept_error_is_not_in_the_log_record(caplog: pytest.LogCaptureFixture) -> None:
    """A raised error holds the frames of its step, and records outlive it."""
    context = above_host()
    context.note_failure(RuntimeError("a lost copy"), of_pass=1)
    with pytest.raises(RuntimeError, match="a lost copy"):
        context.raise_failure()
    assert caplog.records[0].args == ("a lost copy",)


def test_late_errors_of_a_failed_pass_say_nothing_new() -> None:
    context = above_host()
    for _ in range(2):
        context.begin_pass()
    context.told_in = 1
    context.note_failure(RuntimeError("of the failed pass"), of_pass=1)
    context.raise_failure()
    context.note_failure(RuntimeError("of the next"), of_pass=2)
    with pytest.raises(RuntimeError, match="of the next"):
        context.raise_failure()


def test_errors_of_abandoned_copies_are_raised_once_at_a_context_or_the_end_of_a_step() -> None:
    context = above_host()
    context.begin_pass()
    for words in ("one", "another"):
        context.lower[0].failures.append((RuntimeError(words), 1))
    with pytest.raises(RuntimeError, match="one"):
        context.raise_failure()
    context.raise_failure()
    context.told_in = context.num_passes
    context.lower[0].failures.append((RuntimeError("of the same pass, after an error"), 1))
    context.raise_failure()


class Slices(SyncCopier):
    """A copier that cuts device memory out of larger storages."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self._begin = begin

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        return torch.full((self._begin + num_bytes + 7,), 255, dtype=torch.uint8)[self._begin : self._begin + num_bytes]


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_begins_within_a_storage(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())

    def step(model: nn.Module, context: Context, number: int) -> torch.Tensor:
        with context(model):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss.detach()

    want = results(step, model, plain)
    options = {"mode": mode if mode in ("all", "inputs") else "auto"}
    with planned(mode):
        offloader = ActivationOffloader(offload_threshold_mb=0, copier=Slices(64), **options)
        assert same(results(step, model, offloader.offload_context), want)


def test_memory_that_fits_no_dtype_is_refused() -> None:
    context = above_host(Slices(3))
    with pytest.raises(ValueError, match=r"the copier's empty_device returned memory that begins at byte 3"):
        context.empty_device(64, Place(context.lower[0], None), 0)
