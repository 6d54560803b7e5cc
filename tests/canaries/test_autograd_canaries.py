"""Canaries of the activation offloader in torch's autograd, storages and dispatch modes."""

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_memopt.activations.recompute.plain_dispatch import call_as_plain
from hf_memopt.autograd_state import (
    StoragePin,
    VersionGuard,
    called_from_checkpoint,
    called_from_rrelu,
    current_node,
    graph_is_retained,
    in_backward,
    next_node,
    num_tensors_on,
    same_counter,
)


def test_a_detached_alias_with_other_data_shares_the_version_counter() -> None:
    for tensor in (torch.randn(3), torch.randn(3, requires_grad=True) * 2, torch.nn.Parameter(torch.randn(3))):
        guard = VersionGuard(tensor)
        assert not guard.was_modified()
        with torch.no_grad():
            tensor.add_(1)
        assert guard.was_modified()


def test_inside_a_dispatch_mode_an_alias_has_a_counter_of_its_own() -> None:
    """Watch the reason for making guards where tensors are packed, never where operations are recorded."""
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sin.default:
                seen.append(args[0].detach())
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    with Noting():
        torch.sin(x)
    x.add_(1)
    assert seen[0]._version != x._version


def test_a_weak_reference_reserves_the_key_of_a_dead_storage() -> None:
    references, pins, keys = [], [], set()
    for _ in range(100):
        tensor = torch.empty(1000)
        keys.add(tensor.untyped_storage()._cdata)
        references.append(StorageWeakRef(tensor.untyped_storage()))
        pins.append(StoragePin.of(tensor.untyped_storage()))
    assert len(keys) == 100
    assert all(reference.expired() for reference in references[:-1])
    references.clear()
    assert not keys & {torch.empty(1000).untyped_storage()._cdata for _ in range(100)} - {
        tensor.untyped_storage()._cdata
    }


def test_other_data_has_a_counter_of_its_own() -> None:
    """Watch the reason for making views of reloaded memory from `.data`."""
    nothing, memory = torch.empty(0), torch.randn(4)
    first, second = (nothing.data.set_(memory.untyped_storage()) for _ in range(2))
    before = second._version
    first.add_(1)
    assert (second._version, nothing._version) == (before, 0)
    assert torch.equal(second, memory)


def test_views_and_detached_tensors_share_the_key_of_their_storage() -> None:
    x = torch.randn(4, 4)
    assert {view.untyped_storage()._cdata for view in (x, x.t(), x[1], x.detach())} == {x.untyped_storage()._cdata}


def test_a_hook_knows_whether_it_runs_in_backward_and_for_which_node() -> None:
    nodes, ended = [], []

    def unpack(tensor: Tensor) -> Tensor:
        if not nodes:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: ended.append(len(nodes)))
        nodes.append((in_backward(), current_node()))
        return tensor

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        loss = (torch.sin(a) * b).sum()  # saves both factors; the sine saves its input
    assert not in_backward()
    assert current_node() is None
    loss.backward()
    assert [inside for inside, _ in nodes] == [True] * 3
    assert nodes[0][1] == nodes[1][1] != nodes[2][1]
    assert ended == [3]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_saves_its_inputs_from_its_own_file(use_reentrant: bool) -> None:
    found = []

    def pack(tensor: Tensor) -> Tensor:
        found.append((tensor.shape, called_from_checkpoint(sys._getframe(1))))
        return tensor.detach()

    x = torch.randn(5, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(torch.sin, x, use_reentrant=use_reentrant)
        y.exp()
    assert (torch.Size([5]), True) in found
    assert found[-1] == (torch.Size([5]), False)


def test_a_mode_that_ignores_compiled_regions_lets_them_be_compiled() -> None:
    graphs, noted = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Noting(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(func)
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(torch.sin, backend=backend)
    with Noting():
        compiled(torch.ones(3))
    assert len(graphs) == 1


def test_a_hook_that_returns_the_tensor_itself_leaks_it() -> None:
    """Watch the reason for saving a kept tensor as a detached alias."""

    def leaks(pack: Any) -> bool:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = torch.exp(torch.randn(3, requires_grad=True))  # saves its own output
        reference = StorageWeakRef(y.untyped_storage())
        del y
        gc.collect()
        return not reference.expired()

    assert leaks(lambda tensor: tensor)
    assert not leaks(lambda tensor: tensor.detach())


def test_what_a_node_has_saved_can_be_looked_at_without_unpacking_it() -> None:
    """Watch the node attributes that a census of live tensors follows."""
    unpacked = []
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: unpacked.append(tensor) or tensor):
        y = torch.exp(x).sin()
    (saved,) = (tensor for tensor in [y.grad_fn._raw_saved_self])
    assert isinstance(saved.data, Tensor)
    assert not unpacked
    y.sum().backward()
    assert saved.data is None
    assert y.grad_fn._sequence_nr() > y.grad_fn.next_functions[0][0]._sequence_nr()


def test_version_counters_can_be_told_apart_by_trying() -> None:
    """Watch a test by which equal versions mean equal bytes of one storage."""
    whole = torch.randn(8, 8)
    assert all(same_counter(whole, view) for view in (whole.detach(), whole[2:], whole.t(), *whole.chunk(2)))
    assert not any(same_counter(whole, part) for part in (whole.data, *whole.unsafe_chunk(2)))
    assert whole._version == 0


def test_autograd_says_whether_it_retains_the_graph() -> None:
    said = []
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: said.append(graph_is_retained()) or tensor):
        y = x.sin()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert said == [True, False]


def test_rrelu_saves_its_noise_before_it_draws_it() -> None:
    """Watch the reason for not copying rrelu's saved tensors. After a fix in torch, `called_from_rrelu` can go."""
    copies, frames = [], []

    def pack(tensor: Tensor) -> Tensor:
        copies.append((tensor.detach(), tensor.clone()))
        frames.append(called_from_rrelu(sys._getframe(1)))
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        nn.RReLU()(torch.randn(64, requires_grad=True) * 1)
    assert any(frames)
    assert any(not torch.equal(now, then) for now, then in copies)


class AsPlain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_as_plain(func, args, kwargs or {})


class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_operations_inside_a_mode_are_those_outside_only_with_their_dispatch_keys() -> None:
    """Watch for the first assertion of a pair to fail: then `call_as_plain` can go."""
    torch.manual_seed(0)
    matrix, layer = torch.randn(5, 5, dtype=torch.complex64), nn.Bilinear(3, 4, 5)
    inputs = torch.randn(2, 3), torch.randn(2, 4)

    def bilinear() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(*inputs)

    for compute in (lambda: torch.linalg.pinv(matrix), bilinear):
        plain = compute()
        with Empty():
            assert not torch.equal(compute(), plain)
        with AsPlain():
            assert torch.equal(compute(), plain)


def test_tensors_on_a_storage_are_counted() -> None:
    """Watch `num_tensors_on`, which includes views and detached aliases."""
    tensor = torch.zeros(4, 4)
    key = tensor.untyped_storage()._cdata
    assert num_tensors_on(key) == 1
    alias = tensor.detach()
    assert num_tensors_on(key) == 2
    del alias
    parts = tensor[:, :2], tensor[:, 2:]
    assert num_tensors_on(key) == 3
    del parts
    assert num_tensors_on(key) == 1


def test_tensors_of_one_node_are_saved_under_one_number() -> None:
    """Watch also that numbers of two nodes differ."""
    numbers: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        numbers.append(next_node())
        return tensor

    x, y = torch.zeros(2, requires_grad=True) * 1, torch.zeros(2, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        product = x * y
        product.exp()
    first, second, result = numbers
    assert first == second != result


def test_a_tensor_that_is_given_data_counts_its_modifications_with_its_alias() -> None:
    guarded = torch.zeros(4)
    counted = VersionGuard(guarded).counted_together(torch.zeros(2, 2, dtype=torch.float64))
    counted.add_(1)
    assert (guarded._version, counted.dtype, counted.shape) == (1, torch.float64, (2, 2))
