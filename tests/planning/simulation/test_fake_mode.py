"""Tensors without memory: their shared storages, and the operations that torch may cache."""

import copy
from typing import Any

import torch
from simulated import simulated
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def test_a_deep_copy_has_memory_of_its_own_that_its_views_share() -> None:
    def run(device: torch.device) -> Any:
        layer = nn.Linear(4, 4, device=device)
        twin = copy.deepcopy(layer)
        addresses = [tensor.untyped_storage()._cdata for tensor in (layer.weight, twin.weight, twin.weight.t())]
        return addresses[0] != addresses[1], addresses[1] == addresses[2]

    assert simulated(run) == (True, True)


def test_operations_are_told_apart_by_all_that_decides_on_their_results() -> None:
    def results(device: torch.device) -> list[Any]:
        x = torch.zeros(4, 6, device=device)
        whole, half = x.long(), x.half()
        made = [x * 2, whole * 2, whole * 2.0, half * True, x.t() + x.t(), x[:, 2:] + 1, x.sum(0), x.sum(-1, True)]
        made += [torch.cat([x, x]), torch.cat((x, whole), dim=1), x.requires_grad_() * 2, x.view(6, 4), x.clone()]
        made += torch.stack([x, x]).unbind(1)
        return [(each.dtype, tuple(each.shape), each.stride(), each.requires_grad) for each in made]

    def twice(device: torch.device) -> Any:
        first, misses = results(device), FakeTensorMode.cache_info().misses
        return first, results(device), FakeTensorMode.cache_info().misses - misses

    first, second, num_new = simulated(twice)
    assert first == second == results(torch.device("cpu"))
    assert num_new == 0
