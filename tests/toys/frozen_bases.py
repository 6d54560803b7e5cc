"""Small models with a frozen base and adapters that train, and their gradients with and without streaming."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import StreamedWeights

WIDTH, ROWS, DEPTH = 64, 1000, 5
LAYER_BYTES = WIDTH * WIDTH * 4


class AdaptedLinear(nn.Module):
    """A frozen layer beside an adapter that trains."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=bias).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen embedding, layers with adapters, and a frozen head; `checkpointing` names a kind of it."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(AdaptedLinear() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=False).requires_grad_(False)
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.checkpointing == "reentrant":
            x.requires_grad_(True)
        for layer in self.layers:
            x = self._call(layer, x)
        return self.head(x)

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.tanh(layer(x)) + x

        if self.checkpointing == "none":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


def adapted(checkpointing: str = "none") -> Adapted:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Adapted(checkpointing)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Have new tensors on a device, as scripts do that call `torch.set_default_device`."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


# In which weights may begin to stream.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}


def ids(batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, ROWS, (batch, 7), generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], streamed: StreamedWeights | None = None, steps: int = 3
) -> list[Tensor]:
    """Return losses, and gradients of all parameters, of a few steps of SGD."""
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        with streamed.stream() if streamed else nullcontext():
            loss = loss_of(model)
        loss.backward()
        found.append(loss.detach())
        for parameter in trainable(model):
            if parameter.grad is not None:
                found.append(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return found


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def square_loss(model: nn.Module, autocast: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(ids()).float().square().mean()


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def streamed(model: nn.Module, home: Any = "host", **options: Any) -> StreamedWeights:
    return StreamedWeights(model, home=home, device="cpu", **options)
