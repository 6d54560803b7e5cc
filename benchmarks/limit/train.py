"""A small language model learns to count on the CPU; with `--disk`, its saved activations wait on a disk.

The demo starts this script under a memory limit: `python -m benchmarks.limit.demo`.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.limit.reported_steps import report_steps
from hf_memopt import ActivationOffloader
from hf_memopt.disk.files_on_disk import weights_sha256

VOCABULARY, NUM_SEQUENCES, LENGTH, FEW = 256, 4, 512, 16
WIDTH, NUM_LAYERS = 256, 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--disk", type=Path, help="folder on a local disk; without it, activations stay in memory")
    parser.add_argument("--budget-gib", type=float, help="memory for saved activations, with --disk")
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe to the watching process")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    offloader = ActivationOffloader(
        enabled=options.disk is not None,
        disk=options.disk,  # hf_memopt: storages beyond the budget go there and come back for backward
        budget_gib=options.budget_gib,
        offload_threshold_mb=0.25,
    )

    def update(length: int, context: Any) -> float:
        tokens = (torch.randint(VOCABULARY, (NUM_SEQUENCES, 1)) + torch.arange(length)) % VOCABULARY
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item()

    update(FEW, nullcontext())  # makes gradients and optimizer states, which are no part of the comparison
    return report_steps(
        lambda: update(LENGTH, offloader.offload_context(model)),
        options.steps,
        options.events,
        lambda: {"weights_digest": weights_sha256(model)},
    )


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=WIDTH // 64,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


if __name__ == "__main__":
    sys.exit(main())
