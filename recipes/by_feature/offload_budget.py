"""Offloading under a budget: a planner decides for each saved tensor whether to keep, offload or recompute it.

python recipes/by_feature/offload_budget.py --budget_mib 2
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import ActivationOffloader, SyncCopier  # hf_memopt

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
NUM_TOKENS = 64


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device)


def sequences(generator: torch.Generator) -> torch.Tensor:
    """Count upwards from a random start: `(8, 64)` token ids."""
    starts = torch.randint(NUM_TOKENS, (8, 1), generator=generator)
    return ((starts + torch.arange(64)) % NUM_TOKENS).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget_mib", type=float, default=2, help="for saved activations (default: %(default)s)")
    budget_mib = parser.parse_args().budget_mib

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    offloader = ActivationOffloader(  # hf_memopt: the first passes are recorded, then a plan is followed
        budget_gib=budget_mib / 1024,
        offload_threshold_mb=0.1,  # the default of 10 MiB suits large models
        copier=None if on_gpu else SyncCopier(),  # a CPU moves nothing by itself
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(15):
        tokens = sequences(generator)
        with offloader.offload_context(model):  # hf_memopt: around the forward pass and the loss
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")

    print(offloader.report())  # hf_memopt: what became of each storage
    stats = offloader.stats  # hf_memopt
    assert stats.predicted_peak_gib is not None
    assert stats.measured_peak_gib is not None
    print(f"Saved activations: {1024 * stats.measured_peak_gib:.1f} MiB at the peak, of {budget_mib:g} allowed")
    print(f"Predicted: {1024 * stats.predicted_peak_gib:.1f} MiB")


if __name__ == "__main__":
    main()
