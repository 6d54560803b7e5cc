"""Tests of frozen weights that visit a GPU in forward and backward."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_bases import DEPTH, LAYER_BYTES, ROWS, WIDTH, adapted, ids, same, train
from host_waits import host_never_waits
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, StreamedWeights
from hf_memopt.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def loss_of(model: nn.Module, autocast: bool = False) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return model(ids().cuda()).float().square().mean()


@pytest.fixture(autouse=True)
def overwrite_freed_memory() -> Iterator[None]:
    yield
    torch.full((2**22,), float("nan"), device="cuda")


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_gradients_are_those_of_the_resident_run(checkpointing: str, autocast: bool, home: Any, tmp_path: Path) -> None:
    loss = partial(loss_of, autocast=autocast)
    want = train(adapted(checkpointing).cuda(), loss)
    model = adapted(checkpointing)
    base = StreamedWeights(model, home=home, disk=tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert same(train(model.cuda(), loss, base), want)
    assert base.report().device_bytes == 0


def test_device_memory_is_given_back() -> None:
    model = adapted()
    base = StreamedWeights(model, home="host")
    train(model, loss_of, base, steps=2)
    before = torch.cuda.memory_allocated()
    train(model, loss_of, base, steps=2)
    assert torch.cuda.memory_allocated() == before
    adapters = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert before < 2 * adapters + 64 * 1024


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_is_kept(share: float) -> None:
    model = adapted()
    least = 2 * ROWS * WIDTH * 4
    budget = int(least + share * DEPTH * LAYER_BYTES)
    base = StreamedWeights(model, home="host", budget_gib=budget / GIB)
    train(model, loss_of, base, steps=4)
    report = base.report()
    assert report.peak_device_bytes <= budget
    # The head and all layers fit: the table is looked up at home.
    assert report.resident == {"within the budget": report.streamed_bytes - ROWS * WIDTH * 4}


def test_the_host_never_waits() -> None:
    model = adapted()
    base = StreamedWeights(model, home="host")
    tokens = ids().cuda()

    def step() -> None:
        with base.stream():
            loss = model(tokens).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(2):
        step()
    with host_never_waits():
        step()


def test_activations_may_be_offloaded_beside() -> None:
    want = train(adapted().cuda(), loss_of, steps=4)
    model = adapted()
    base = StreamedWeights(model, home="host")
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0.0001)

    def loss(model: nn.Module) -> Tensor:
        with offloader.offload_context(model):
            return loss_of(model)

    assert same(train(model, loss, base, steps=4), want)
    assert offloader.stats.bytes_moved > 0


def test_remove_puts_the_weights_onto_the_device() -> None:
    model, plain = adapted(), adapted().cuda()
    base = StreamedWeights(model, home="host")
    train(model, loss_of, base, steps=1)
    train(plain, loss_of, steps=1)
    base.remove()
    assert same([*model.parameters()], [*plain.parameters()])


def test_auto_takes_host_memory_where_it_has_room() -> None:
    assert StreamedWeights(adapted()).report().home == "host"
