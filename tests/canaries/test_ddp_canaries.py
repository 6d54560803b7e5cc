"""Canaries of the refusal of torch's Join, and of static graphs before their first exchange, in DDP's state."""

import pytest
import torch
from reliance import relied_on_by
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("one_rank")

DDP = "hf_memopt/training/rank_exchange.py"


def ddp(**options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 1), **options)


def test_join_is_on_from_its_beginning_until_it_is_turned_off() -> None:
    model = ddp()
    with relied_on_by(DDP):
        found = [model._join_config.enable]
        with Join([model]):
            found.append(model._join_config.enable)
        found.append(model._join_config.enable)
        with Join([model], enable=False):
            found.append(model._join_config.enable)
        found.append(model._join_config.enable)
    assert found == [False, True, True, False, False]


def test_a_static_graph_says_that_it_has_run_backward() -> None:
    model = ddp(static_graph=True)
    with relied_on_by(DDP):
        found = [model.static_graph, model._static_graph_delay_allreduce_enqueued]
        with torch.no_grad():
            model(torch.ones(1, 2))
        found.append(model._static_graph_delay_allreduce_enqueued)
        model(torch.ones(1, 2)).sum().backward()
        found.append(model._static_graph_delay_allreduce_enqueued)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
    assert found == [True, False, False, True]


def test_a_static_graph_cannot_begin_without_an_exchange() -> None:
    """Watch the error that is the reason for a refusal."""
    model = ddp(static_graph=True)
    with model.no_sync(), pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        model(torch.ones(1, 2)).sum().backward()
