"""Activation offloading: saved tensors wait in host memory until backward needs them. The weights come out equal.

python recipes/by_feature/activation_offloading.py
"""

import torch
from torch import nn

from hf_memopt import ActivationOffloader, SyncCopier  # hf_memopt

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*blocks).to(device)


def train(offloader: ActivationOffloader) -> nn.Sequential:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        x = torch.randn(1024, 256, generator=generator).to(device)
        with offloader.offload_context(model):  # hf_memopt: around the forward pass and the loss
            loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")
    return model


plain = train(ActivationOffloader(enabled=False))
# "all" offloads every tensor above the threshold; "auto", the default, plans. A CPU has no other memory to offload
# to, so that nothing is moved there; a SyncCopier moves it all the same, to try it out.
offloader = ActivationOffloader(mode="all", offload_threshold_mb=0.5, copier=None if on_gpu else SyncCopier())
offloaded = train(offloader)
print(f"{offloader.stats.bytes_moved / 2**20:.0f} MiB went to host memory and came back")  # hf_memopt
equal = all(map(torch.equal, plain.parameters(), offloaded.parameters()))
print(f"Weights equal to those without offloading: {equal}")
