"""The process of one workload and one kind: its set-up, a small step, and the steps under a limit."""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.limit.kinds import KINDS
from benchmarks.limit.workloads import make_workload
from hf_memopt.disk.digests import weights_sha256
from hf_memopt.recipes.memory_limit.reported_steps import report_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=json.loads, help="JSON of the workload, the kind and their options")
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe for events")
    options = parser.parse_args()
    return train(options.events, **options.settings)


def train(
    events: int, *, workload: str, kind: str, is_toy: bool, num_steps: int, folder: str, budget_gib: float
) -> int:
    torch.manual_seed(0)
    training = make_workload(workload, is_toy)

    def update(loss: torch.Tensor) -> float:
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)  # so that gradients are part of the memory at rest
        return loss.item()

    update(training.loss_of_little())
    handling = KINDS[kind](training, Path(folder), budget_gib)
    gc.collect()

    def step() -> float:
        with handling.context():
            loss = training.loss()
        return update(loss)

    def results() -> dict[str, Any]:
        return {"weights_digest": weights_sha256(training.model), "stats": handling.stats()}

    return report_steps(step, num_steps, events, results)


if __name__ == "__main__":
    sys.exit(main())
