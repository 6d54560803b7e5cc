"""Streamed weights of simulated steps: bytes against those of real runs, and times in closed form."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import StreamedWeights
from hf_memopt.planning import MemoryEstimate, estimate_peak_memory
from hf_memopt.planning.accounting.categories import FROZEN, STREAMED
from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import Like, simulate_step
from hf_memopt.planning.estimate_report import StreamedEstimate, as_facts, as_json
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.transfer.file_reader import PART_BYTES, staging_bytes
from hf_memopt.units import MIB

WIDTH, WORDS, ROWS = 64, 512, 16
CARD = CARDS["rtx4090"]


class Adapted(nn.Module):
    """A frozen layer, and the product of two trained ones beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(width, 8, bias=False)
        self.lora_B = nn.Linear(8, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Model(nn.Module):
    def __init__(self, depth: int = 4, width: int = WIDTH, reentrant: bool | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(Adapted(width), nn.ReLU(), Adapted(width)) for _ in range(depth))
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.head = nn.Linear(width, WORDS, bias=False).requires_grad_(False)
        self._reentrant = reentrant

    def forward(self, words: Any) -> Any:
        x = self.table(words).requires_grad_()
        for block in self.blocks:
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return self.head(self.norm(x)).logsumexp(-1).mean()


class Job:
    """Trains adapters on streamed weights, or on resident ones with `home` None."""

    def __init__(self, model: nn.Module, device: torch.device, autocast: bool = False, **options: Any) -> None:
        self.model, self.autocast = model, autocast
        self.streamed = None if options["home"] is None else StreamedWeights(model, device=device, **options)
        model.to(device)
        self.optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        self.words = torch.zeros(1, ROWS, dtype=torch.long, device=device)

    def step(self) -> None:
        rounded = torch.autocast(self.words.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with self.streamed.stream() if self.streamed else nullcontext(), rounded:
            loss = self.model(self.words)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def estimate(reentrant: bool | None = None, like: Like = "cpu", num_steps: int = 3, **options: Any) -> MemoryEstimate:
    def setup(device: torch.device) -> Job:
        return Job(Model(reentrant=reentrant), device, **options)

    return estimate_peak_memory(setup, Job.step, like=like, num_steps=num_steps)


def real_bytes(reentrant: bool | None, **options: Any) -> tuple[int, int]:
    """Return the peak of the device's memory for streamed weights, and the bytes that the third step brings."""
    job = Job(Model(reentrant=reentrant), torch.device("cpu"), **options)
    assert job.streamed is not None
    brought = [0]
    for _ in range(3):
        job.step()
        brought.append(job.streamed.report().bytes_to_device)
    *_, newest = (after - before for before, after in pairwise(brought))
    return job.streamed.report().peak_device_bytes, newest


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.25)
def test_bytes_are_those_of_a_real_run(home: str, reentrant: bool | None, autocast: bool) -> None:
    options: dict[str, Any] = {"home": home, "autocast": autocast}
    found = estimate(reentrant, **options).streamed
    assert found is not None
    assert (found.peak_bytes, found.bytes_to_device) == real_bytes(reentrant, **options)
    assert found.bytes_read == (found.bytes_to_device if home == "file" else 0)


@pytest.mark.parametrize("kib", [290, 320, 400])
@pytest.mark.sweep(share=0.3)
def test_a_hot_set_is_that_of_a_real_run(kib: int) -> None:
    options: dict[str, Any] = {"home": "host", "budget_gib": kib / 2**20}
    found = estimate(**options).streamed
    assert found is not None
    assert (found.peak_bytes, found.bytes_to_device) == real_bytes(None, **options)
    assert found.peak_bytes <= kib * 2**10
    smaller = estimate(home="host").streamed
    assert smaller is not None
    assert found.bytes_to_device < smaller.bytes_to_device


def test_memory_of_visits_has_a_label_of_its_own() -> None:
    found = estimate(home="host", like="cuda")
    assert found.streamed is not None
    table = WORDS * WIDTH * 4
    assert FROZEN in found.breakdown  # the norm, which is small
    assert found.breakdown[FROZEN] < table < found.breakdown[STREAMED] <= found.streamed.peak_bytes
    resident = estimate(home=None, like="cuda")
    assert STREAMED not in resident.breakdown
    assert resident.streamed is None
    frozen = sum(weight.nbytes for weight in Model().parameters() if not weight.requires_grad)
    assert resident.breakdown[FROZEN] == frozen + 2 * 256  # the norm, in blocks of 512 bytes
    in_file = estimate(home="file", like="cuda")
    assert found.host_bytes - in_file.host_bytes == pytest.approx(frozen - staging_bytes(frozen), rel=0.01)


LARGE, DEPTH = 2048, 4


def seconds(home: str, link_bytes_per_s: float, disk_bytes_per_s: float = 1e12) -> MemoryEstimate:
    card = replace(CARD, link_bytes_per_s=link_bytes_per_s)
    simulated = SimulatedStep(
        lambda device: Job(nn.Sequential(*(Adapted(LARGE) for _ in range(DEPTH))), device, home=home),
        _wide_step,
        num_steps=3,
    )
    below = MemoryBelow(None, Disk(None, disk_bytes_per_s))
    return run_isolated(lambda: simulate_step(simulated, gpu=card, below=below))


def _wide_step(job: Job) -> None:
    x = torch.zeros(ROWS, LARGE, device=job.words.device, requires_grad=True)
    assert job.streamed is not None
    with job.streamed.stream():
        loss = job.model(x).square().mean()
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def test_copies_over_a_slow_link_or_from_a_slow_disk_set_the_time() -> None:
    layer = LARGE * LARGE * 4
    brought = (2 * DEPTH - 2) * layer  # two layers are kept at the turn to backward
    over_link = seconds("host", 1e9)
    assert over_link.streamed == StreamedEstimate(2 * layer, brought, 0)
    assert over_link.stall_ms == pytest.approx(1e3 * brought / 1e9, rel=0.02)
    from_disk = seconds("file", 1e10, 1e9)
    assert from_disk.streamed == StreamedEstimate(2 * layer, brought, brought)
    last_part_ms = 1e3 * PART_BYTES / 1e10
    assert from_disk.stall_ms == pytest.approx(1e3 * brought / 1e9 + last_part_ms, rel=0.02)
    assert seconds("file", 1e9, 1e12).stall_ms == pytest.approx(over_link.stall_ms, rel=0.02)
    fast = seconds("host", 1e13)
    assert fast.stall_ms is not None
    assert fast.stall_ms < 0.1


def test_an_estimate_says_what_streams() -> None:
    found = replace(estimate(home="file"), streamed=StreamedEstimate(512 * MIB, 2048 * MIB, 2048 * MIB))
    line = "0.50 GiB of the device at most, 2.00 GiB brought in a step, read from files"
    assert f"Streamed weights: {line}" in found.text()
    assert as_facts(found)["streamed weights"] == line
    assert as_json(found)["streamed"]["bytes_read"] == 2048 * MIB
    assert found.with_passes(3).streamed == StreamedEstimate(512 * MIB, 6144 * MIB, 6144 * MIB)
