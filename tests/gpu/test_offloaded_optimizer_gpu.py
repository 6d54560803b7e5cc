"""Tests of an optimizer's state that visits a GPU during the update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import host_never_waits
from optimizer_toys import MAKERS, backward, model, same, train
from torch import nn
from torch.optim import Optimizer

from hf_memopt import OffloadedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = ("adamw", "adamw fused", "adam amsgrad", "sgd foreach", "rmsprop", "adafactor")


def trained(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Optimizer]:
    network = model(dtype, "cuda")
    optimizer = MAKERS[kind](network.parameters())
    if options:
        optimizer = OffloadedOptimizer(optimizer, **options)
    train(network, optimizer)
    torch.full((2**22,), float("nan"), device="cuda")  # freed memory, overwritten
    return network, optimizer


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_state_are_those_of_the_plain_optimizer(
    kind: str, dtype: torch.dtype, home: Any, tmp_path: Path
) -> None:
    assert same(trained(kind, dtype, home=home, disk=tmp_path), trained(kind, dtype))


@pytest.mark.parametrize("home", ["host", "file"])
def test_all_state_is_read_and_written_once_in_an_update(home: Any, tmp_path: Path) -> None:
    network, optimizer = trained("adamw", home=home, disk=tmp_path)
    assert isinstance(optimizer, OffloadedOptimizer)
    report = optimizer.report()
    assert report.state_bytes == sum(-(-4 * each.numel() // 256) * 256 * 2 for each in network.parameters())
    assert report.bytes_written == 4 * report.state_bytes
    assert report.bytes_read == 3 * report.state_bytes
    assert {each.device.type for state in optimizer.state.values() for each in state.values()} == {"cpu"}


def test_no_state_stays_on_the_device() -> None:
    network = model(device="cuda")
    optimizer = OffloadedOptimizer(MAKERS["adamw"](network.parameters()))
    held = []
    for number in range(3):
        backward(network, number)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        held.append(torch.cuda.memory_allocated() - before)
        optimizer.zero_grad()
    assert held == [0, 0, 0]


def test_the_host_never_waits_for_the_device() -> None:
    network, optimizer = trained("adamw foreach", home="host")
    backward(network, 4)
    with host_never_waits():
        optimizer.step()


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_model_that_moves_after_its_first_update_takes_its_state_along(home: Any, tmp_path: Path) -> None:
    network = model()
    optimizer = OffloadedOptimizer(MAKERS["adamw"](network.parameters()), home, disk=tmp_path)
    train(network, optimizer)
    state = optimizer.state_dict()
    network.cuda()
    backward(network, 4)
    with pytest.raises(RuntimeError, match="were moved from cpu to cuda:0 without their optimizer's state"):
        optimizer.step()
    optimizer.load_state_dict(state)
    optimizer.step()
