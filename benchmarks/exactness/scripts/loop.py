"""A loop with an Accelerator: `loop.py [--dropout P] [--compile]`."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.exactness.tiny import WIDTH, blocks

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    model = blocks(options.dropout)
    loader = DataLoader(TensorDataset(torch.randn(32, 16, WIDTH)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.compile:
        model.compile()
    for (batch,) in loader:
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
