"""Gradient cache: a contrastive loss over 512 samples with the activations of 64 at a time, and the same gradient.

accelerate launch recipes/by_feature/gradient_cache.py
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt import GradientCache  # hf_memopt

BATCH, MICRO_BATCH = 512, 64
Pair = tuple[Tensor, Tensor]


def make_pairs(generator: torch.Generator, device: torch.device) -> Pair:
    """Return two noisy views of each sample, `(BATCH, 32)`."""
    samples = torch.randn(BATCH, 32, generator=generator)
    first, second = (samples + 0.1 * torch.randn(BATCH, 32, generator=generator) for _ in range(2))
    return first.to(device), second.to(device)


def contrastive(first: Tensor, second: Tensor) -> Tensor:
    """Return the InfoNCE loss, in which each sample is compared with all others: it does not add up over parts."""
    similarities = nn.functional.normalize(first) @ nn.functional.normalize(second).T / 0.1
    return nn.functional.cross_entropy(similarities, torch.arange(len(first), device=first.device))


accelerator = Accelerator()
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 16))
encoder, optimizer = accelerator.prepare(encoder, torch.optim.AdamW(encoder.parameters(), lr=1e-3))


def forward(pair: Pair) -> Pair:
    return encoder(pair[0]), encoder(pair[1])


cache = GradientCache(accelerator, forward, contrastive, models=[encoder])  # hf_memopt
generator = torch.Generator().manual_seed(1)

pairs = make_pairs(generator, accelerator.device)
contrastive(*forward(pairs)).backward()
whole = [parameter.grad for parameter in encoder.parameters()]
optimizer.zero_grad()
cache.backward(list(zip(*(view.split(MICRO_BATCH) for view in pairs), strict=True)))  # hf_memopt
error = max((a.grad - b).abs().max() / b.abs().max() for a, b in zip(encoder.parameters(), whole, strict=True))
accelerator.print(f"Largest difference from the whole batch's gradient: {error:.1e} of the largest entry")
optimizer.zero_grad()

for step in range(60):
    views = make_pairs(generator, accelerator.device)
    micro_batches = list(zip(*(view.split(MICRO_BATCH) for view in views), strict=True))
    result = cache.step(micro_batches, optimizer, max_grad_norm=1.0)  # hf_memopt: forward, backward, clip, update
    if step % 20 == 19:
        accelerator.print(f"step {step + 1:2}  loss {result.loss:.4f}")
