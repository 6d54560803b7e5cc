"""Full fine-tuning in little memory: weights, gradients and AdamW's state live in files, and visit the device.

    accelerate launch --cpu recipes/by_feature/trained_weights.py

The same training without it ends with the same weights, bit for bit.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from hf_memopt import StreamedWeights

WIDTH, DEPTH, BATCHES = 512, 8, 4


def train(in_files: bool) -> nn.Module:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    weights = None
    if in_files:  # hf_memopt: before an optimizer or accelerate moves the weights
        weights = StreamedWeights(model, home="file", trained=True, device=accelerator.device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if weights is not None:
        optimizer = weights.adopt(optimizer)  # hf_memopt: updates visit weights, gradients and state
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(BATCHES):
        x = torch.randn(16, WIDTH, device=accelerator.device)
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if weights is not None:
        print(weights.report())  # hf_memopt: what visits took, and what moved
        weights.remove()
    return accelerator.unwrap_model(model)


def main() -> None:
    plain, ours = train(in_files=False), train(in_files=True)
    equal = all(map(torch.equal, plain.parameters(), ours.parameters()))
    print(f"weights equal to those of training in memory: {equal}")


if __name__ == "__main__":
    main()
