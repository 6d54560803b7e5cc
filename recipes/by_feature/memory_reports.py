"""Where memory goes: the peak of each phase, a report when memory runs out, and a check for leaks.

python recipes/by_feature/memory_reports.py
"""

import torch
from torch import Tensor, nn

from hf_memopt import MemoryTracker, detect_leaks, explain_oom  # hf_memopt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tracker = MemoryTracker(device)  # hf_memopt
kept_losses: list[Tensor] = []


def step() -> Tensor:
    x = torch.randn(512, 64, device=device)
    with tracker.phase("forward"):  # hf_memopt
        loss: Tensor = (model(x) - x).square().mean()
    with tracker.phase("backward"):  # hf_memopt
        loss.backward()
    with tracker.phase("optimizer"):  # hf_memopt
        optimizer.step()
        optimizer.zero_grad()
    tracker.step()  # hf_memopt
    return loss


def leaking_step() -> None:
    """Keep each loss for a plot, and with it the graph; `loss.item()` would not."""
    kept_losses.append(step())


with explain_oom(model, output_dir="outputs/memory_reports"):  # hf_memopt: adds a report to an OutOfMemoryError
    for _ in range(10):
        step()
for phase, peak in tracker.peaks.items():
    print(f"{phase:10} {peak.certain_bytes / 2**20:8.1f} MiB")  # of the GPU; of host memory where there is none
print(f"\nA step that is right:\n{detect_leaks(step)}")  # hf_memopt: runs it sixty times
print(f"\nOne that keeps its losses:\n{detect_leaks(leaking_step)}")  # hf_memopt
