"""Tests that models compiled in place, by layer or as a step, give the compiled gradients bitwise when offloaded."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from gradients import equal, take_gradients
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier

NUM_STEPS = 5
Model = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)) for _ in range(2))
    return nn.Sequential(*layers)


def train(how: str, backend: str, offloader: ActivationOffloader | None) -> list[list[Tensor]]:
    net = make_layers()
    if how in ("model", "wrapped"):
        net.compile(backend=backend)
    for layer in net if how == "layers" else ():
        layer.compile(backend=backend)
    if how == "wrapped" and offloader is not None:
        offloader.wrap(net)

    def step(x: Tensor) -> Tensor:
        is_plain = how == "wrapped" or offloader is None
        with nullcontext() if is_plain else offloader.offload_context(net):
            return net(x).square().mean()

    compiled_step = torch.compile(step, backend=backend) if how == "step" else step
    found = []
    for number in range(NUM_STEPS):
        compiled_step(torch.randn(8 + number // 3, 8, generator=torch.Generator().manual_seed(number))).backward()
        found.append(take_gradients(net))
    return found


@pytest.mark.parametrize("mode", ["all", "inputs", "auto"])
@pytest.mark.parametrize("how", ["model", "layers", "step", "wrapped"])
@pytest.mark.sweep(share=0.25)
def test_gradients_are_the_compiled_plain_ones(how: str, mode: str) -> None:
    want = train(how, "aot_eager", None)
    torch._dynamo.reset()
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
    found = train(how, "aot_eager", offloader)
    assert all(map(equal, found, want))
    assert (offloader.stats.bytes_moved > 0) == (mode != "inputs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.parametrize("how", ["model", "layers", "wrapped"])
def test_gradients_are_those_that_inductor_computes(how: str, mode: str) -> None:
    want = train(how, "inductor", None)
    torch._dynamo.reset()
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
    assert all(map(equal, train(how, "inductor", offloader), want))
    assert offloader.stats.bytes_moved > 0


@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.sweep(share=0.5)
def test_a_backward_inside_of_a_compiled_step(mode: str, recwarn: pytest.WarningsRecorder) -> None:
    """Check that destructors inside a compiled step release host memory."""
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())

    def run(is_offloaded: bool) -> list[list[Tensor]]:
        torch._dynamo.reset()
        net = make_layers()

        def step(x: Tensor) -> None:
            with offloader.offload_context(net) if is_offloaded else nullcontext():
                loss = net(x).square().mean()
            loss.backward()

        compiled, found = torch.compile(step, backend="aot_eager"), []
        for number in range(NUM_STEPS):
            compiled(torch.randn(8, 8, generator=torch.Generator().manual_seed(number)))
            found.append(take_gradients(net))
        return found

    assert all(map(equal, run(True), run(False)))
    assert offloader.stats.host_bytes_live == 0
    assert not [warning for warning in recwarn if "__del__" in str(warning.message)]
