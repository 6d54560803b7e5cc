"""Exact accumulation: micro-batches that hold different numbers of tokens give the gradient of the whole batch.

accelerate launch recipes/by_feature/exact_accumulation.py --mixed_precision bf16
"""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt import MicroBatcher, train_step  # hf_memopt

PADDING = -100
Batch = dict[str, Tensor]


def make_batch(generator: torch.Generator, num_samples: int) -> Batch:
    """Return sequences of 4 to 32 tokens, padded, whose label is the next token of a walk: `(num_samples, 32)`."""
    lengths = torch.randint(4, 33, (num_samples, 1), generator=generator)
    starts = torch.randint(16, (num_samples, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(33)) % 16
    labels = tokens[:, 1:].masked_fill(torch.arange(32) >= lengths, PADDING)
    return {"tokens": tokens[:, :-1], "labels": labels}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
accelerator = Accelerator(mixed_precision=parser.parse_args().mixed_precision)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
generator = torch.Generator().manual_seed(accelerator.process_index)

for _ in range(50):
    micro_batches = [make_batch(generator, 4) for _ in range(8)]
    on_device = [{key: x.to(accelerator.device) for key, x in batch.items()} for batch in micro_batches]
    # hf_memopt: one optimizer step; each micro-batch weighs as much as it has labels, over all processes
    result = train_step(accelerator, model, loss_fn, on_device, optimizer, max_grad_norm=1.0)
accelerator.print(f"step {accelerator.step}  loss {result.loss:.4f}  gradient norm {result.grad_norm:.3f}")

# hf_memopt: the same on whole batches, in micro-batches that are halved where memory runs out
batcher = MicroBatcher(accelerator, micro_batch_size=16)
for _ in range(50):
    batch = {key: x.to(accelerator.device) for key, x in make_batch(generator, 32).items()}
    result = batcher.train_step(model, loss_fn, batch, optimizer, max_grad_norm=1.0)
accelerator.print(f"step {accelerator.step}  loss {result.loss:.4f}  in {result.num_micro_batches} micro-batches")
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
