import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from hf_memopt.planning.accounting.operation import Operation, device_kind, name_of, tensors_in


def test_tensors_of_an_operation_in_their_order() -> None:
    first, second, third = (torch.zeros(size) for size in (1, 2, 3))
    operation = Operation.of(torch.ops.aten.cat.default, ([first, second], 0), {"out": third}, third)
    assert list(map(id, operation.inputs)) == list(map(id, (first, second, third)))
    assert list(map(id, operation.outputs)) == [id(third)]
    assert name_of(operation.function) == "aten.cat.default"


def test_a_tensor_made_of_others_counts_as_these() -> None:
    first, second = torch.zeros(2), torch.ones(2)
    assert list(map(id, tensors_in((TwoTensor(first, second), None, 3)))) == [id(first), id(second)]


def test_the_device_of_a_fake_tensor_is_the_one_that_it_stands_for() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    assert device_kind(fake) == "cuda"
    assert device_kind(torch.empty(2, device="meta")) == "meta"
    assert tensors_in(fake) == [fake]
