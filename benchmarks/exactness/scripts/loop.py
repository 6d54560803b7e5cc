"""A loop with an Accelerator: `loop.py [--dropout P] [--compile]`."""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import set_seed

WIDTH = 64


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(Block(options.dropout) for _ in range(3)))
    loader = DataLoader(TensorDataset(torch.randn(32, 16, WIDTH)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.compile:
        model.compile()
    for (batch,) in loader:
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
