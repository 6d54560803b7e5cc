"""Tests of weights that train, and of their gradients, which visit a GPU in forward, backward and update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import host_never_waits
from torch import Tensor, nn
from trained_toys import ROWS, WIDTH, Training, are_equal, network, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TABLE_BYTES = ROWS * WIDTH * 4


def on_gpu(checkpointing: str = "none", **options: Any) -> Training:
    found = trained(make=lambda: network(checkpointing), device="cuda", **options)
    torch.full((2**22,), float("nan"), device="cuda")  # freed memory, overwritten
    return found


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["adamw", "adamw fused", "adafactor"])
def test_training_is_that_of_plain_weights(
    kind: str, checkpointing: str, autocast: bool, home: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kind": kind, "autocast": autocast, "checkpointing": checkpointing}
    assert are_equal(on_gpu(home=home, disk=tmp_path, **options), on_gpu(**options))


@pytest.mark.parametrize("kind", ["adamw foreach", "sgd foreach", "rmsprop foreach"])
def test_kernels_for_many_parameters_are_those_of_the_plain_run(kind: str) -> None:
    assert are_equal(on_gpu(home="host", kind=kind), on_gpu(kind=kind))


def test_blocks_move_as_often_as_the_arithmetic_says() -> None:
    training = on_gpu(home="host", num_updates=2)
    assert training.weights is not None
    before = training.weights.report()
    training.update(2)
    after = training.weights.report()
    weights = after.streamed_bytes
    unused = WIDTH * WIDTH * 4  # which no pass visits
    gradients = weights - unused
    assert after.bytes_to_home - before.bytes_to_home == weights - unused
    # Two micro-batches, forward and backward, and the update: what stays from one to the next is brought once less.
    assert 0 < after.bytes_to_device - before.bytes_to_device <= 5 * (weights - unused)
    written = after.gradient_bytes[1] - before.gradient_bytes[1]
    read = after.gradient_bytes[0] - before.gradient_bytes[0]
    assert written == 2 * sum(each.nbytes for each in training.model.parameters() if _has_home(training, each))
    assert read <= 2 * gradients


def _has_home(training: Training, parameter: nn.Parameter) -> bool:
    assert training.weights is not None
    return parameter in training.weights._streamed and parameter is not training.model.unused.weight  # type: ignore[union-attr]


def test_device_memory_is_that_of_visits() -> None:
    training = on_gpu(home="host", num_updates=1)
    assert training.weights is not None
    training.found.clear()
    before = torch.cuda.memory_allocated()
    training.run(2)
    training.found.clear()
    assert torch.cuda.memory_allocated() == before
    assert training.weights.report().peak_device_bytes <= 2 * TABLE_BYTES + 8192


def test_the_host_never_waits() -> None:
    ids = torch.arange(24, device="cuda")

    def loss_of(model: nn.Module, number: int, autocast: bool) -> Tensor:
        return nn.functional.cross_entropy(model(ids), ids)

    training = on_gpu(home="host", num_updates=3, loss_of=loss_of)
    with host_never_waits():
        training.update(3)
