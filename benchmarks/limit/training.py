"""A training of one workload and one kind, after its set-up and a small step."""

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.limit.kinds import KINDS
from benchmarks.limit.workloads import make_workload
from hf_memopt.disk.files_on_disk import weights_sha256


class Training:
    def __init__(self, workload: str, kind: str, is_toy: bool, folder: str, budget_gib: float) -> None:
        torch.manual_seed(0)
        self._workload = make_workload(workload, is_toy)
        self._update(self._workload.loss_of_little())
        self._handling = KINDS[kind](self._workload, Path(folder), budget_gib)
        gc.collect()

    def step(self) -> float:
        with self._handling.context():
            loss = self._workload.loss()
        return self._update(loss)

    def results(self) -> dict[str, Any]:
        return {"weights_digest": weights_sha256(self._workload.model), "stats": self._handling.stats()}

    def _update(self, loss: torch.Tensor) -> float:
        loss.backward()
        self._workload.optimizer.step()
        self._workload.optimizer.zero_grad(set_to_none=False)  # so that gradients are part of the memory at rest
        return loss.item()
