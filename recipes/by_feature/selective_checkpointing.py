"""Selective checkpointing: matrix products and attention are kept, everything cheap is computed again in backward.

python recipes/by_feature/selective_checkpointing.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import apply_selective_checkpointing  # hf_memopt
from hf_memopt.memory import SavedBytes  # hf_memopt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, use_cache=False, **sizes)
    return LlamaForCausalLM(config).to(device).train()


def gradients(model: LlamaForCausalLM, policy: str) -> list[torch.Tensor]:
    tokens = torch.arange(1024, device=device).view(8, 128) % 64
    with SavedBytes(exclude=model.parameters()) as saved:  # hf_memopt: counts saved tensors
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    print(f"{policy:10} {saved.total_bytes / 2**20:6.1f} MiB saved  loss {loss.item():.6f}")
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


model = make_model()
plain = gradients(model, "none")
for policy in ("heavy_ops", "all"):
    handle = apply_selective_checkpointing(model, policy)  # hf_memopt: one line, before training
    equal = all(map(torch.equal, gradients(model, policy), plain))
    print(f"           gradients equal to the plain ones: {equal}")
    handle.remove()
