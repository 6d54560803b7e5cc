"""What each process of test_source.py runs: `coupling_rank.py <folder>`.

Both precompute into one folder, then train a student twice under DDP, online and from the folder.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from alone import leave
from coupling_toys import Teacher, load, make_plan, write
from torch import Tensor, nn

from hf_memopt.lerobot.couplings.source import CouplingSource


def train(accelerator: Accelerator, source: CouplingSource) -> Tensor:
    """The weights after three epochs."""
    torch.manual_seed(0)
    student = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(student.parameters())
    model, optimizer = accelerator.prepare(student, optimizer)
    for epoch in range(3):
        source.set_epoch(epoch)
        for coupling in source:
            velocity = model(coupling.noise.flatten(1))
            loss = (velocity - (coupling.noise - coupling.target).flatten(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return student.weight.detach().clone()


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank, plan = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}, make_plan()
    solved = []
    teacher = Teacher()
    teacher.register_forward_hook(lambda *_: solved.append(1))
    write(folder / "cache", solve=teacher, **rank)
    accelerator.wait_for_everyone()
    online = CouplingSource.online(Teacher(), load, plan, **rank)
    cached = CouplingSource.cached(folder / "cache", load, expected=plan.key, **rank)
    weights = [train(accelerator, source) for source in (online, cached)]
    assert torch.equal(*weights)
    samples = [index for coupling in cached for index in coupling.indices]
    found = {"weights": weights[0].tolist(), "samples": samples, "solved": len(solved)}
    (folder / f"rank{rank['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
