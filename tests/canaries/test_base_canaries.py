"""Canaries of streamed bases in torch's storages, modules and autograd."""

import copy
import pickle
from typing import Any

import torch
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


def test_copy_and_pickle_ask_the_object_for_its_methods() -> None:
    parameter: Any = nn.Parameter(torch.ones(1))
    parameter.__deepcopy__ = lambda memo: "asked"
    assert copy.deepcopy(parameter) == "asked"
    parameter.__reduce_ex__ = lambda protocol: (int, ("7",))
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
