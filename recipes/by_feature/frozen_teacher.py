"""Distillation from a frozen teacher that lives in host memory: its weights visit the device for its forward pass.

python recipes/by_feature/frozen_teacher.py
"""

import torch
from torch import nn

from hf_memopt import OffloadedTeacher  # hf_memopt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))


torch.manual_seed(0)
# hf_memopt: "swap" brings all weights at once, "stream" a few at a time, and "auto" chooses
teacher = OffloadedTeacher(network(1024), device=device, mode="swap")
student = network(64).to(device)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
for step in range(100):
    x = torch.randn(256, 32, generator=generator).to(device)
    with teacher.onload() as model, torch.no_grad():  # hf_memopt: the weights are on the device here, and only here
        target = model(x)
    loss = (student(x) - target).square().mean()
    loss.backward()
    teacher.prefetch()  # hf_memopt: the next visit's copy starts now, beside the optimizer's step
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1:3}  loss {loss.item():.5f}")
print(teacher.report())  # hf_memopt: bytes copied, and how long compute waited for them
