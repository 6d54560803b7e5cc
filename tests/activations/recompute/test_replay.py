"""Tests that recomputation gives the same bits from unchanged bytes, and is refused from changed bytes."""

from collections.abc import Callable

import pytest
import torch
from device_states import above_host
from torch import Tensor, nn

from hf_memopt.activations.recompute.op_tracer import OpTracer
from hf_memopt.activations.recompute.replay import Recomputation, RecomputedStorage, Resolver
from hf_memopt.activations.saved_tensors.storages import KeptStorage, LiveStorage
from hf_memopt.autograd_state import bytes_of


class Pass:
    """A stand-in for a forward pass, which records operations and keeps the saved tensors."""

    def __init__(self) -> None:
        self.context = above_host()
        self.recorder = OpTracer(frozenset(), None)

    def save(self, tensor: Tensor) -> LiveStorage:
        live = KeptStorage(tensor, self.context, 0)
        live.saved_by = self
        live.num_writes = self.recorder.num_writes(live.key)
        return live

    def find_live(self, key: int) -> LiveStorage | None:
        entry = self.context.storages.get(key)
        return None if entry is None else entry()

    def resolve(self, tensor: Tensor) -> Recomputation | None:
        return Resolver(self.recorder, self.find_live).resolve(self.recorder.operand(tensor))

    def computation(self, tensor: Tensor) -> Recomputation:
        found = self.resolve(tensor)
        assert found is not None
        return found


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(0))


def test_the_same_bits_from_a_saved_storage_by_way_of_what_nobody_saved(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.relu()
        y = saved[2:].exp().sin().mul(2)
    live = forward.save(saved)
    computation = forward.computation(y)
    assert [source.live for source in computation.sources()] == [live]
    assert len(computation.steps()) == 3
    assert not computation.reads_weights_alone()
    assert torch.equal(computation.run({live: live.fetch(0, True)}), bytes_of(y))


def test_an_intermediate_with_two_readers_is_computed_once(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.relu()
        middle = saved.exp()
        y = middle.sin() + middle.cos()
    live = forward.save(saved)
    computation = forward.computation(y)
    assert len(computation.steps()) == 4
    assert torch.equal(computation.run({live: live.fetch(0, True)}), bytes_of(y))


def test_one_of_several_outputs(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.view(2, 4).relu()
        _, mean, _ = torch.native_layer_norm(saved, [4], None, None, 1e-5)
    live = forward.save(saved)
    assert torch.equal(forward.computation(mean).run({live: live.fetch(0, True)}), bytes_of(mean))


def test_a_cast_of_a_weight_reads_weights_alone() -> None:
    forward, weight = Pass(), nn.Parameter(torch.ones(8))
    with forward.recorder:
        cast = weight.to(torch.bfloat16)
    computation = forward.computation(cast)
    assert computation.reads_weights_alone()
    assert not any(is_spoilt() for is_spoilt in computation.checks())
    assert torch.equal(computation.run({}), bytes_of(cast))


def modify(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def free(weight: Tensor) -> None:
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(modify, "modified by an inplace operation"), (free, r'weight of shape \(8,\) was freed .*use mode="all"')],
)
def test_a_weight_that_is_no_longer_what_it_was_is_refused(spoil: Callable[[Tensor], None], message: str) -> None:
    forward, weight = Pass(), nn.Parameter(torch.ones(8))
    with forward.recorder:
        cast = weight.to(torch.bfloat16)
    computation = forward.computation(cast)
    spoil(weight)
    assert any(is_spoilt() for is_spoilt in computation.checks())
    with pytest.raises(RuntimeError, match=message) as raised:
        computation.run({})
    assert 'mode="all"' in "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def test_what_is_only_alive_is_offered_to_be_saved(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        alive = torch.rand_like(x)  # random, so it cannot be recomputed
        y = alive.exp()
    (source,) = forward.computation(y).sources()
    assert source.live is None
    assert source.tensor is alive
    assert source.num_bytes == alive.nbytes


def test_there_is_no_computation_from_what_is_gone_or_drawn_or_written_to(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        drawn = torch.rand_like(x)
        of_gone = torch.rand_like(x).exp()
        written = x.relu()
        of_written = written.exp()
        written.add_(1)
    assert forward.resolve(drawn) is None
    assert forward.resolve(of_gone) is None
    assert forward.resolve(of_written) is None


@pytest.mark.parametrize("saves", [False, True])
def test_there_is_no_computation_from_what_was_written_to_through_data(x: Tensor, saves: bool) -> None:
    """Check writes through `.data`, which change no version counter."""
    forward = Pass()
    with forward.recorder:
        written, weight = torch.rand_like(x), nn.Parameter(x)
        of_written, of_weight = written.exp(), weight.exp()
        written.data.mul_(2)
        weight.data.mul_(2)
    live = forward.save(written) if saves else None
    assert forward.resolve(of_written) is None
    assert forward.resolve(of_weight) is None
    assert live is None or live.num_writes == 1


def test_a_recomputed_storage_holds_nothing_until_it_is_read(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.relu()
        y = saved.exp()
    live, want = forward.save(saved), bytes_of(y).clone()
    before = forward.context.held.now_bytes
    storages = [RecomputedStorage(y, forward.context, 1, forward.computation(y), None)]
    assert live.num_dependents == 1
    assert (storages[0].is_kept, storages[0].num_bytes) == (False, y.nbytes)
    assert forward.context.held.now_bytes == before

    def read(gradient: Tensor) -> None:
        (storage,) = storages
        got = storage.fetch(1, True)
        assert torch.equal(got, want)
        assert got.data_ptr() != y.data_ptr()
        assert live.num_dependents == 0  # the recomputed storage needs no more sources
        assert forward.context.held.now_bytes == before + y.nbytes
        assert storage.fetch(1, False).data_ptr() == got.data_ptr()
        read_in.append("a backward that frees its graph")

    read_in: list[str] = []
    z = torch.ones(2, requires_grad=True).exp()
    z.register_hook(read)
    z.sum().backward()
    assert read_in
    storages.clear()
    assert forward.context.held.now_bytes == before


def test_where_the_graph_is_retained_it_is_computed_for_each_backward(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.relu()
        y = saved.exp()
    live = forward.save(saved)
    storage = RecomputedStorage(y, forward.context, 1, forward.computation(y), None)
    storage.num_views = 1
    before = forward.context.held.now_bytes
    for backward in (1, 2):  # outside of backward, autograd reports a retained graph
        assert torch.equal(storage.fetch(backward, True), bytes_of(y))
        forward.context.held.settle()
        assert forward.context.held.now_bytes == before
    assert live.num_dependents == 1


def test_a_recomputed_storage_that_dies_unread_lets_its_sources_go(x: Tensor) -> None:
    forward = Pass()
    with forward.recorder:
        saved = x.relu()
        y = saved + saved  # one storage, read twice
    live = forward.save(saved)
    storage = RecomputedStorage(y, forward.context, 1, forward.computation(y), None)
    assert live.num_dependents == 1
    del storage
    assert live.num_dependents == 0
