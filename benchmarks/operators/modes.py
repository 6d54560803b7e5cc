"""The ways of training a neural operator with less activation memory that `neural_operator.py` compares."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from neuralop import LpLoss
from neuralop.models import FNO
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from benchmarks.activations.modes import Handling
from benchmarks.cells import UnavailableError
from hf_memopt import ActivationOffloader, SyncCopier, apply_selective_checkpointing

# The model of neuralop's guide to CPU offloading, and one that a CPU runs at once.
SIZES: dict[str, dict[str, Any]] = {
    "real": {"n_modes": (16, 16), "hidden_channels": 32, "projection_channel_ratio": 2},
    "toy": {"n_modes": (4, 4), "hidden_channels": 4, "projection_channel_ratio": 2},
}
CHECKPOINTED = ("FNOBlocks", "lifting", "projection")
SHARE_WITHOUT_CARD = 0.2  # of what is saved, as the budget of "ours auto" where no card sets one


def build_model(size: str, device: torch.device) -> nn.Module:
    """An FNO with random weights, gradients allocated and zero."""
    torch.manual_seed(0)
    model = FNO(in_channels=1, out_channels=1, **SIZES[size]).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@dataclass(frozen=True)
class Work:
    """A batch of random coefficients and targets, `(batch_size, 1, nodes, nodes)`, in float32."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @staticmethod
    def make(model: nn.Module, nodes: int, batch_size: int, device: torch.device) -> "Work":
        generator = torch.Generator(device).manual_seed(1)
        shape = batch_size, 1, nodes, nodes
        x, y = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        return Work(model, (x > 0).float(), y)

    def loss(self) -> Tensor:
        return LpLoss(d=2)(self.model(self.x), self.y)

    def step(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Gradients of one batch, in place of the last ones. The optimizer would only add the same to every mode."""
        self.model.zero_grad(set_to_none=False)
        with context():
            loss = self.loss()
        loss.backward()


@dataclass(frozen=True)
class Setting:
    """What every mode is built from.

    Attributes:
        model: without checkpointing.
        device: where it trains.
        saved_bytes: what autograd saves for one step.
        wrapper_host_bytes: page-locked host memory that torch's `save_on_cpu` would take.
        host_limit_bytes: host memory to take at most.
        room_bytes: what an emulated card leaves for saved activations; None without a card.
    """

    model: nn.Module
    device: torch.device
    saved_bytes: int
    wrapper_host_bytes: int
    host_limit_bytes: int
    room_bytes: int | None


@contextlib.contextmanager
def plain(setting: Setting) -> Iterator[Handling]:
    """Everything stays on the device."""
    yield Handling()


@contextlib.contextmanager
def wrapper(setting: Setting) -> Iterator[Handling]:
    """`save_on_cpu` around each forward, as in neuralop's guide."""
    if setting.wrapper_host_bytes > setting.host_limit_bytes:
        needed = setting.wrapper_host_bytes / 2**30
        raise UnavailableError(f"needs {needed:.1f} GiB of page-locked host memory")
    yield Handling(lambda: save_on_cpu(pin_memory=True))


@contextlib.contextmanager
def checkpointing(setting: Setting) -> Iterator[Handling]:
    """Fourier layers, lifting and projection keep their inputs and compute the rest again."""
    handle = apply_selective_checkpointing(setting.model, "all", modules=CHECKPOINTED)
    try:
        yield Handling()
    finally:
        handle.remove()


@contextlib.contextmanager
def ours_inputs(setting: Setting) -> Iterator[Handling]:
    """Checkpointing whose inputs this library moves."""
    with checkpointing(setting):
        yield _with(setting, mode="inputs")


@contextlib.contextmanager
def ours_all(setting: Setting) -> Iterator[Handling]:
    """This library moves everything that is saved."""
    yield _with(setting, mode="all")


@contextlib.contextmanager
def ours_auto(setting: Setting) -> Iterator[Handling]:
    """This library's plan within what the card has room for."""
    room = setting.room_bytes
    budget_bytes = round(SHARE_WITHOUT_CARD * setting.saved_bytes) if room is None else room
    if budget_bytes <= 0:
        raise UnavailableError("weights and temporaries leave no room for saved activations")
    yield _with(setting, budget_bytes, mode="auto", budget_gib=budget_bytes / 2**30)


def _with(setting: Setting, budget_bytes: int | None = None, **options: Any) -> Handling:
    on_cpu = setting.device.type == "cpu"
    offloader = ActivationOffloader(
        offload_threshold_mb=0 if on_cpu else 1.0,
        host_budget_gib=setting.host_limit_bytes / 2**30,
        copier=SyncCopier() if on_cpu else None,
        **options,
    )
    return Handling(lambda: offloader.offload_context(setting.model), lambda: offloader.stats, budget_bytes)


# What gradients are compared with comes first.
MODES: dict[str, Callable[[Setting], AbstractContextManager[Handling]]] = {
    "plain": plain,
    "checkpointing": checkpointing,
    "save_on_cpu": wrapper,
    "ours inputs": ours_inputs,
    "ours all": ours_all,
    "ours auto": ours_auto,
}
OURS = tuple(mode for mode in MODES if mode.startswith("ours"))
