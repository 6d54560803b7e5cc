"""Tests of one process under DDP. tests/distributed/test_ddp_modes.py has steps of two processes."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.training.rank_exchange import (
    check_exchange_after_backward,
    check_first_window,
    check_not_joined,
)

pytestmark = pytest.mark.usefixtures("one_rank")

PLACES: dict[str, Callable[[nn.Module], list[object]]] = {
    "itself": lambda model: [model],
    "compiled": lambda model: [torch.compile(model, backend="eager")],
    "second of two": lambda model: [nn.ModuleList([nn.Linear(1, 1), model])],
    "beside a function": lambda model: [print, model],
}


@pytest.mark.parametrize("place", PLACES)
def test_join_is_found(place: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    models = PLACES[place](model)
    check_not_joined(models)
    with Join([model]), pytest.raises(ValueError, match="torch's Join is on"):
        check_not_joined(models)


@pytest.mark.parametrize("place", PLACES)
def test_a_static_graph_without_an_exchange_is_found(place: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    models = PLACES[place](model)
    accelerator = Accelerator(cpu=True)
    check_first_window(accelerator, models, 1)
    with pytest.raises(ValueError, match=r"static_graph=True: .* has 2 micro-batches"):
        check_first_window(accelerator, models, 2)
    with pytest.raises(ValueError, match=r"static_graph=True: .* first step with train_step"):
        check_exchange_after_backward(models)
    model(torch.ones(1, 2)).sum().backward()
    check_first_window(accelerator, models, 2)
    check_exchange_after_backward(models)


def test_each_backward_of_a_static_graph_may_exchange() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(1, sync_each_batch=True)
    )
    check_first_window(accelerator, [model], 2)


def test_models_without_a_static_graph_may_begin_as_they_like() -> None:
    models = [nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1))]
    check_first_window(Accelerator(cpu=True), models, 2)
    check_exchange_after_backward(models)
