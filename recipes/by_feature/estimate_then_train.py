"""The peak before the run: whole training steps on tensors without memory, on any machine, for any card.

python recipes/by_feature/estimate_then_train.py --gpu rtx3060-12gb
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import estimate_peak_memory  # hf_memopt

BATCH, LENGTH = 8, 512


def setup(device: torch.device) -> tuple[LlamaForCausalLM, torch.optim.Optimizer, torch.Tensor]:
    """Build everything on `device`: a real one, or the estimate's, which has no memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1024, use_cache=False, **sizes)
    with device:
        model = LlamaForCausalLM(config)
        tokens = torch.randint(1024, (BATCH, LENGTH))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens


def step(state: Any) -> float:
    model, optimizer, tokens = state
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() if tokens.device.type == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="rtx4090", help="a card's name, or a size such as 8GiB (default: %(default)s)")
    gpu = parser.parse_args().gpu
    estimate = estimate_peak_memory(setup, step, gpu=gpu)  # hf_memopt: before the first backward on a GPU
    print(estimate.text(gpu))  # hf_memopt: with the verdict, does it fit?
    if not torch.cuda.is_available():
        print("No GPU here: nothing to compare with.")
        return
    state = setup(torch.device("cuda"))
    for _ in range(2):
        step(state)
    measured = torch.cuda.max_memory_allocated()
    print(f"Predicted {estimate.peak_bytes / 2**20:.1f} MiB, measured {measured / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
