"""Models and helpers of the tests of selective checkpointing."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from tiny_decoders import some_tokens, tiny_decoder
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.activations import ActivationOffloader
from hf_memopt.transfer import SyncCopier

POLICIES = ["heavy_ops", "all", "alternate"]


def keep_everything(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return True


# ------------------------------------------------------------------------------------------------ models


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.norm(self.conv(x).relu_()), 0.1, self.training)


class ConvNet(nn.Module):
    """A network that writes in place into kept tensors, as many networks do."""

    def __init__(self, block: type[nn.Module] = ConvBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=4,
    )
    return transformers.ViTForImageClassification(config).train()


TOKENS = some_tokens()
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
MAPS = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "qwen3": (lambda: tiny_decoder(attention_dropout=0.1), lambda model: model(input_ids=TOKENS, labels=TOKENS).loss),
    "vit": (vit, lambda model: model(pixel_values=IMAGES, labels=torch.tensor([0, 3])).loss),
    "conv": (ConvNet, lambda model: model(MAPS)),
}


N, D = 4, 8
UNIT = N * D * 4  # bytes of (N, D) in fp32


class Mlp(nn.Module):
    """tanh(gelu(x W) V): two matrix products of F operations together, and tanh, which saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(gelu(self.up(x))))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], context: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    torch.manual_seed(4)
    with context or nullcontext():
        value = loss(model)
    value.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def offloader(copier: Any = None) -> ActivationOffloader:
    return ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier or SyncCopier())


def build(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    make, loss = MODELS[name]
    torch.manual_seed(0)
    return make(), loss
