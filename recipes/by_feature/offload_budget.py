"""Saved activations within a budget: a planner decides for each one whether to keep, offload or recompute it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import ActivationOffloader, SyncCopier  # hf_memopt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
offloader = ActivationOffloader(  # hf_memopt: records the first passes, then follows a plan
    budget_gib=0.002,  # of the device, for what autograd saves
    offload_threshold_mb=0.1,  # the default of 10 MiB suits large models
    copier=SyncCopier() if device.type == "cpu" else None,  # to try it on a CPU, which offloads nothing by itself
)
for _ in range(15):
    tokens = (torch.randint(64, (8, 1), device=device) + torch.arange(64, device=device)) % 64  # counts upwards
    with offloader.offload_context(model):  # hf_memopt: around the forward pass and the loss
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.2f}")
print(offloader.report())  # hf_memopt: who saved what, and what became of it
stats = offloader.stats
print(f"At the peak: {stats.predicted_peak_gib:.5f} GiB predicted, {stats.measured_peak_gib:.5f} GiB measured")
