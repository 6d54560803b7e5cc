"""Tests that fail every single call into CUDA: the error is raised, nothing leaks, the next step is bitwise right."""

import copy
import gc
import sys
from collections.abc import Callable

import pytest
import torch
from faults.mutations import Tally
from gradients import take_gradients
from torch import Tensor, nn

from fake_cuda import device
from fake_cuda.plugin import ExpectFaults
from hf_memopt import ActivationOffloader, OffloadedTeacher

# Refused memory, torch's allocator tries again after it has released its cache.
TIMES = {"malloc": 2, "host_register": 1, "copy": 1, "event": 1}
# The most calls of a kind that fail in turn; the slow test fails all.
MOST = 4


class Training:
    """Training of four layers, in which a pass still runs when the next begins."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))).cuda()
        self._x = torch.randn(64, 32).cuda()
        self.offloader = ActivationOffloader(offload_threshold_mb=0.001, **options)

    def run(self) -> list[Tensor]:
        for _ in range(3):
            with self.offloader.offload_context(self.model):
                loss = self.model(self._x).square().mean()
            self.model.zero_grad()
            loss.backward()
        return [gradient.cpu() for gradient in take_gradients(self.model)]

    def held(self) -> int:
        return self.offloader.stats.host_bytes_live


class Teaching:
    def __init__(self, mode: str, **options: object) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).eval()
        self._x = torch.randn(4, 32).cuda()
        self._teacher = OffloadedTeacher(copy.deepcopy(network), device="cuda", mode=mode, **options)

    def run(self) -> list[Tensor]:
        found = []
        for _ in range(2):
            self._teacher.prefetch()
            with self._teacher.onload() as module, torch.no_grad():
                found.append(module(self._x).cpu())
        return found

    def held(self) -> int:
        return self._teacher.report().device_bytes


SUBJECTS: dict[str, Callable[[], Training | Teaching]] = {
    "all": lambda: Training(mode="all"),
    "auto": lambda: Training(mode="auto", budget_gib=20e-6),
    "swap": lambda: Teaching("swap"),
    "stream": lambda: Teaching("stream"),
    "swap from a file": lambda: Teaching("swap", home="file"),
    "stream from a file": lambda: Teaching("stream", home="file"),
}


def attack(subject: str, kind: str, most: int | None) -> Tally:
    """Fail each call in turn, or `most` calls spread over the run."""
    want = SUBJECTS[subject]().run()
    tally = Tally(f"{kind} fails in {subject}", seed=0)
    num_calls = count_calls(subject, kind)
    step = 1 if most is None else max(1, num_calls // most)
    for k in range(1, num_calls + 1, step):
        fail_one(subject, kind, k, want, tally)
    return tally


def count_calls(subject: str, kind: str) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    before = device.num_calls(kind)
    SUBJECTS[subject]().run()
    return device.num_calls(kind) - before


def fail_one(subject: str, kind: str, k: int, want: list[Tensor], tally: Tally) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    device.fail(kind, k, TIMES[kind])
    case = f"call {k}"
    try:
        run = SUBJECTS[subject]()
    except (RuntimeError, ValueError):  # a refusal to stream from memory that is not pinned
        device.forget_faults()
        tally.refused += 1
        return
    try:
        got = run.run()
    except RuntimeError:
        tally.refused += 1
    else:
        tally.right += 1
        if not same(got, want):
            tally.silent.append(case)
    device.forget_faults()
    if not same(run.run(), want):
        tally.silent.append(f"{case}, the run after it")
    gc.collect()
    if run.held():
        tally.lost.append(f"{case}: {run.held()} bytes held")


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.fixture(autouse=True)
def errors_in_destructors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide errors that Python only prints."""
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)


@pytest.mark.parametrize("most", [MOST, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_calls_fail(subject: str, kind: str, most: int | None, expect_faults: ExpectFaults) -> None:
    attack(subject, kind, most).check(1)
    device.forget_faults()
