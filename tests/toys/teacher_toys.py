"""Teachers with everything that makes offloading go wrong, small enough for any test."""

import itertools

import torch
from torch import Tensor, nn

WIDTH = 8  # of a `Sampler`


class Network(nn.Module):
    """A tie, a strided weight, buffers of both kinds, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.transposed = nn.Parameter(torch.randn(6, 6).t())
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.register_buffer("frequencies", torch.randn(6), persistent=False)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x) + self.tied(x)) @ self.transposed
        return self.low((x * self.frequencies).bfloat16()).float()


def memory_of(module: nn.Module) -> dict[str, int]:
    return {
        name: tensor.data_ptr() for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    }


class Layer(nn.Module):
    """A layer that reads a child's weights without calling it, as attention does, with buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * self.scale + self.shift)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.narrow(self.wide(x).tanh().bfloat16()).float()


class Sampler(nn.Module):
    """A flow-matching policy: a prefix that runs once, a head that is never used, and K expert steps."""

    def __init__(self, num_prefix: int = 5, num_expert: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, WIDTH)
        self.prefix = nn.ModuleList(Layer() for _ in range(num_prefix))
        self.head = nn.Linear(WIDTH, 500)
        self.expert = nn.ModuleList(Layer() for _ in range(num_expert))
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.expert[0].attention.out_proj.weight  # tied across blocks
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def sample(self, tokens: Tensor, num_steps: int, use_head: bool = False) -> Tensor:
        """Sample without `forward`, as lerobot's policies do."""
        x = self.embedding(tokens)
        for layer in self.prefix:
            x = layer(x)
        if use_head:
            x = x + self.head(x)[..., :WIDTH]
        y = torch.zeros_like(x)
        for _ in range(num_steps):
            z = x + y
            for layer in self.expert:
                z = layer(z)
            y = y + self.again(z) * self.gain / num_steps
        return y
