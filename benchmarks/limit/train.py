"""A small language model learns to count on the CPU, in a plain loop on Accelerate.

The demo runs it below a memory limit: `python -m benchmarks.limit.demo`.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.limit.printed import show, show_end, show_rest

VOCABULARY, NUM_SEQUENCES, LENGTH = 256, 4, 224


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="updates (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    options = parser.parse_args()
    begun_s = show_rest()
    set_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            max_position_embeddings=LENGTH,
        )
    )
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(1, options.steps + 1):
        tokens = (torch.randint(VOCABULARY, (NUM_SEQUENCES, 1)) + torch.arange(LENGTH)) % VOCABULARY
        loss = prepared(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        show(step=step, loss=loss.item())
    show_end([model], begun_s)


if __name__ == "__main__":
    main()
