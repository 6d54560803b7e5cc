"""Tests that a pass moves each storage once, as planned, and knows when backward needs it and ends."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from device_states import above_host
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt.activations.offloaded_pass import OffloadedPass
from hf_memopt.activations.pass_recorder import RecordedPass
from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.activations.saved_tensors.storages import LiveStorage
from hf_memopt.activations.stats import OffloadCounters
from hf_memopt.autograd_state import ViewMeta, bytes_of

NUM_BYTES = 256
ACTIONS = Action.KEEP, Action.OFFLOAD
PLAN = OffloadPlan(ACTIONS, (0, 0), NUM_BYTES, 0, (1,), 0, 1.0, 1.0, 0.0, 0.0, NUM_BYTES, NUM_BYTES, 0, 0)
RECORDING = RecordedPass(
    Profile(tuple(SavedStorage(NUM_BYTES, at_s, (1 - at_s,)) for at_s in (0.0, 0.25)), 1.0),
    (NUM_BYTES, NUM_BYTES),
    ("first", "second"),
)


@pytest.fixture
def context() -> DeviceState:
    return above_host()


def tensor(num_bytes: int = NUM_BYTES) -> Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(0))


def save(forward: OffloadedPass, saved: Tensor) -> LiveStorage:
    storage = saved.untyped_storage()
    return forward.save(saved, storage._cdata, storage.nbytes())


class Packed:
    """A stand-in for the object that autograd keeps instead of a tensor."""

    def __init__(self, forward: OffloadedPass, saved: Tensor) -> None:
        self.read_in = 0
        self.meta, self.storage = ViewMeta(saved), save(forward, saved)
        self.storage.num_views += 1


def hooks(forward: OffloadedPass) -> AbstractContextManager[None]:
    return saved_tensors_hooks(
        lambda saved: Packed(forward, saved), lambda packed: packed.meta.of(forward.use(packed.storage, packed))
    )


def test_one_copy_serves_all_views_of_a_storage(context: DeviceState) -> None:
    counters, x = OffloadCounters(), tensor()
    forward = OffloadedPass(context, 1, counters)
    first = save(forward, x)
    assert save(forward, x[16:]) is first
    assert first.saved_by is forward
    assert forward.sizes == [NUM_BYTES]
    assert context.bytes_moved == NUM_BYTES
    assert counters.bytes_deduplicated == NUM_BYTES - 64


def test_what_was_modified_in_between_is_saved_anew(context: DeviceState) -> None:
    forward, x = OffloadedPass(context, 1, OffloadCounters()), tensor()
    first = save(forward, x)
    x.add_(1)
    second = save(forward, x)
    assert second is not first
    assert forward.sizes == [NUM_BYTES, NUM_BYTES]
    assert torch.equal(second.fetch(0, True), bytes_of(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.fetch(0, True)


def test_what_an_earlier_pass_has_put_somewhere_stays_there(context: DeviceState) -> None:
    x = tensor()
    first = save(OffloadedPass(context, 1, OffloadCounters()), x)
    later = OffloadedPass(context, 1, OffloadCounters())
    assert save(later, x) is first
    assert first.saved_by is later
    assert later.sizes == [NUM_BYTES]
    assert context.bytes_moved == NUM_BYTES


def test_two_of_the_largest_storage_wait_for_their_copies(context: DeviceState) -> None:
    forward = OffloadedPass(context, 1, OffloadCounters())
    saved = [tensor() for _ in range(4)]
    held = []
    storages = []
    for each in saved:
        storages.append(save(forward, each))
        held.append(context.held.now_bytes // NUM_BYTES)
    assert held == [1, 2, 2, 2]
    assert [storage.is_leaving for storage in storages] == [False, False, True, True]
    forward.release()
    assert context.held.now_bytes == 0


def test_what_the_host_has_no_room_for_stays() -> None:
    context, counters = above_host(host_bytes=NUM_BYTES), OffloadCounters()
    forward = OffloadedPass(context, 1, counters)
    storages = [save(forward, each) for each in (tensor(), tensor())]
    assert [storage.is_kept for storage in storages] == [False, True]
    assert counters.bytes_kept == NUM_BYTES
    forward.release()
    assert context.held.now_bytes == NUM_BYTES  # the host has no copy of these bytes


def planned(context: DeviceState, plan: OffloadPlan = PLAN, **options: object) -> OffloadedPass:
    return OffloadedPass(context, 1, OffloadCounters(), plan=plan, recording=RECORDING, **options)


def kinds(forward: OffloadedPass, sizes: tuple[int, ...]) -> list[bool]:
    saved = [tensor(size) for size in sizes]
    storages = [save(forward, each) for each in saved]
    return [storage.is_kept for storage in storages]


def test_a_plan_says_what_stays_and_more_storages_than_it_knows_are_offloaded(context: DeviceState) -> None:
    assert kinds(planned(context), (NUM_BYTES, NUM_BYTES, NUM_BYTES)) == [True, False, False]


def test_what_would_break_the_budget_is_offloaded(context: DeviceState) -> None:
    assert kinds(planned(context, budget_bytes=NUM_BYTES), (NUM_BYTES,)) == [True]
    assert kinds(planned(above_host(), budget_bytes=NUM_BYTES), (2 * NUM_BYTES,)) == [False]


def test_a_plan_for_these_sizes_keeps_nothing_of_a_larger_pass() -> None:
    keep = dataclasses.replace(PLAN, actions=(Action.KEEP, Action.KEEP))
    assert kinds(planned(above_host(), keep), (2 * NUM_BYTES, NUM_BYTES)) == [True, True]
    larger = planned(above_host(), keep, is_for_these_sizes=True)
    assert kinds(larger, (2 * NUM_BYTES, NUM_BYTES)) == [False, False]


def compute(x: Tensor) -> Tensor:
    return x.exp().sin().square().sum()


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_are_bitwise_the_plain_ones_and_each_end_is_reported(context: DeviceState, retain: bool) -> None:
    x = tensor().requires_grad_()
    want = torch.autograd.grad(compute(x), x)[0]
    ended: list[OffloadedPass] = []
    forward = OffloadedPass(context, 1, OffloadCounters(), on_end=ended.append)
    with hooks(forward):
        loss = compute(x)
    inside = []
    loss.register_hook(lambda gradient: inside.append(bool(forward._backwards)))
    assert not forward._backwards
    for _ in range(1 + retain):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=retain)[0], want)
        assert not forward._backwards
    assert ended == [forward] * (1 + retain)
    assert inside[0] is False  # no storage is read when backward begins
    assert forward.peak_bytes >= 2 * NUM_BYTES
    assert forward.elapsed_s() > 0
    del loss
    assert context.held.now_bytes == 0


def break_off(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_backward_that_was_broken_off_ends_with_the_next_save(context: DeviceState) -> None:
    x = tensor().requires_grad_()
    forward = OffloadedPass(context, 1, OffloadCounters())
    with hooks(forward):
        middle = x.exp()
        loss = middle.sin().sum()
    middle.register_hook(break_off)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert forward._backwards
    save(forward, tensor())
    assert not forward._backwards


@pytest.mark.parametrize(("ahead", "expected"), [(0, [2, 1, 0]), (1, [1, 0, 0])])
def test_backward_brings_back_as_far_ahead_as_it_was_told(
    context: DeviceState, ahead: int, expected: list[int]
) -> None:
    """Compare the numbers of storages that are still away after each use, in the reverse order of saving."""
    forward = OffloadedPass(context, ahead, OffloadCounters())
    views = [Packed(forward, tensor()) for _ in range(3)]
    forward.release()
    assert away_after_each_use(forward, views) == expected
    assert all(view.storage.is_away for view in views)  # the end of backward drops the reloaded bytes


def test_a_large_storage_that_never_leaves_does_not_widen_the_window(context: DeviceState) -> None:
    """Check a large storage such as a language model's logits, with which backward begins before their copy ends."""
    forward = OffloadedPass(context, 1, OffloadCounters())
    saved = [tensor() for _ in range(6)] + [tensor(6 * NUM_BYTES)]
    views = [Packed(forward, each) for each in saved]
    assert sum(view.storage.is_away for view in views) == 4  # two small ones and the large one wait for their copies
    assert away_after_each_use(forward, views) == [4, 4, 3, 2, 1, 0, 0]


def test_a_large_storage_that_has_left_widens_the_window(context: DeviceState) -> None:
    forward = OffloadedPass(context, 1, OffloadCounters())
    saved = [tensor(2 * NUM_BYTES)] + [tensor() for _ in range(5)]
    views = [Packed(forward, each) for each in saved]
    forward.release()
    assert away_after_each_use(forward, views) == [3, 2, 1, 1, 0, 0]


def away_after_each_use(forward: OffloadedPass, views: list[Packed]) -> list[int]:
    """Use views in the reverse order of saving, in a backward; return how many storages are away after each use."""
    found: list[int] = []

    def use(view: Packed) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            forward.use(view.storage, view)
            found.append(sum(each.storage.is_away for each in views))

        return hook

    y = torch.ones(2, requires_grad=True)
    for view in views:
        y = y.exp()
        y.register_hook(use(view))
    y.sum().backward()
    return found
