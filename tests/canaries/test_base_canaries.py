"""Canaries of streamed bases in torch's storages, modules and autograd."""

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from reliance import relied_on_by
from torch import Tensor, nn
from torch.autograd import Variable

from hf_memopt.autograd_state import current_backward


def test_a_storage_keeps_its_key_and_its_views_through_a_time_without_memory() -> None:
    block = torch.arange(8.0)
    storage, view = block.untyped_storage(), block[2:4]
    key, num_bytes = storage._cdata, storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(num_bytes)
    block.fill_(3)
    assert storage._cdata == key == view.untyped_storage()._cdata
    assert view.tolist() == [3, 3]


def test_a_node_runs_its_prehooks_before_it_unpacks_and_high_numbers_run_first() -> None:
    order: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: order.append("unpack") or t):
        first = x.view_as(x)
        middle = first * torch.ones(2)
        last = middle * torch.ones(2)
    for name, tensor in {"first": first, "middle": middle, "last": last}.items():
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(lambda gradients, name=name: order.append(name))
    numbers = [tensor.grad_fn._sequence_nr() for tensor in (first, middle, last)]
    assert numbers == sorted(numbers)
    last.sum().backward()
    assert order == ["last", "unpack", "middle", "unpack", "first"]


def test_a_callback_queued_in_backward_runs_at_its_end_and_not_where_it_fails() -> None:
    ended: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def queue(gradients: Any) -> None:
        number = current_backward()
        Variable._execution_engine.queue_callback(lambda: ended.append(number))

    for fails in (False, True):
        y = x * 2
        z = y.exp()
        z.grad_fn.register_prehook(queue)
        y.grad_fn.register_prehook(lambda gradients, fails=fails: 1 / 0 if fails else None)
        try:
            z.sum().backward()
        except ZeroDivisionError:
            assert fails
    assert len(ended) == 1


def test_an_attribute_of_a_module_comes_before_its_parameter() -> None:
    layer = nn.Linear(2, 2)
    vars(layer)["weight"] = torch.zeros(2, 2)
    assert not layer.weight.any()
    del vars(layer)["weight"]
    assert layer.weight is layer._parameters["weight"]


class Seen(nn.Parameter):
    """A class that a parameter is given for a while."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_parameter_may_change_its_class_and_is_seen_before_each_function() -> None:
    table = nn.Embedding(4, 4).requires_grad_(False)
    weight, x = table.weight, torch.ones(1, 4, requires_grad=True)
    weight.__class__ = Seen
    Seen.functions.clear()
    with relied_on_by("hf_memopt/weights/residency/away.py"):
        nn.functional.linear(x, weight).sum().backward()
        assert nn.functional.linear in Seen.functions
        table(torch.tensor([1]))
        assert Seen.functions[-1] is nn.functional.embedding
        assert weight.shape == (4, 4)
        assert Seen.functions[-1] == Tensor.shape.__get__
        torch._foreach_norm([weight])
        assert Seen.functions[-1] is torch._foreach_norm
        torch.ops.aten.mm(x.detach(), weight)
        assert Seen.functions[-1] in (torch.ops.aten.mm, torch.ops.aten.mm.default)
    weight.__class__ = nn.Parameter
    Seen.functions.clear()
    assert table(torch.tensor([1])).shape == (1, 4)
    assert Seen.functions == []


def test_attention_takes_its_fast_path_for_plain_parameters_without_hooks_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *given: calls.append(1) or fast(*given))
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), relied_on_by("hf_memopt/weights/residency/units.py"):
        layer(x)
        assert len(calls) == 1
        layer.linear1.weight.__class__ = Seen
        layer(x)
        assert len(calls) == 1
        layer.linear1.weight.__class__ = nn.Parameter
        layer.linear1.register_forward_hook(lambda *_: None)
        layer(x)
        assert len(calls) == 1


def test_copy_and_pickle_ask_a_parameter_for_its_methods() -> None:
    class Asked(nn.Parameter):
        def __deepcopy__(self, memo: Any) -> Any:
            return "asked"

        def __reduce_ex__(self, protocol: Any) -> Any:
            return int, ("7",)

    parameter = nn.Parameter(torch.ones(1))
    parameter.__class__ = Asked
    assert copy.deepcopy(parameter) == "asked"
    assert pickle.loads(pickle.dumps(parameter)) == 7


def test_a_view_saved_for_backward_reads_what_its_storage_has_then() -> None:
    weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    x = torch.ones(1, 2, requires_grad=True)
    y = x @ weight.t()
    storage = weight.untyped_storage()
    held: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    storage.resize_(0)
    storage.resize_(16)
    held.view(torch.float32)[:] = 5
    y.sum().backward()
    assert x.grad.tolist() == [[10, 10]]
