"""Tests that swapped weights are bitwise right, travel in one copy, and survive any exception."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, AdversarialTransfer, InjectedError
from interrupts import Interrupter
from teacher_toys import Network, memory_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher

SCHEDULES = ("early", "late", "random")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_swap_is_bitwise_resident_and_copies_nothing_back(network: Network, x: Tensor, schedule: str) -> None:
    want = [network(k * x) for k in range(1, 6)]
    resident = OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="resident")
    copier = AdversarialCopier(schedule)
    swapped = OffloadedTeacher(network, device="cpu", mode="swap", copier=copier)
    home = memory_of(network)
    for k, expected in enumerate(want, start=1):
        with swapped.onload() as module:
            assert torch.equal(module(k * x), expected)
        with resident.onload() as module:
            assert torch.equal(module(k * x), expected)
    report = swapped.report()
    assert report.bytes_host_to_device == len(want) * report.host_bytes
    assert report.bytes_device_to_host == 0
    assert report.device_bytes == copier.live_bytes == 0
    assert memory_of(network) == home
    assert resident.report().bytes_host_to_device == 0


def test_a_missing_wait_is_caught(network: Network, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=AdversarialCopier("late"))
    monkeypatch.setattr(AdversarialTransfer, "wait", lambda self: None)
    with pytest.raises(AssertionError, match="released under a copy"):
        with teacher.onload() as module:
            assert module(x).isnan().all()


def count_operations(network: Network, x: Tensor) -> int:
    copier = AdversarialCopier()
    with OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="swap", copier=copier).onload() as module:
        module(x)
    return copier.num_operations


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_visit_is_right_after_a_fault_in_any_copy(network: Network, x: Tensor, schedule: str) -> None:
    want = network(x)
    num_operations = count_operations(network, x)
    assert num_operations == 3  # allocate, copy, wait
    for fail_at in range(1, 2 * num_operations + 1):
        copier = AdversarialCopier(schedule, fail_at=fail_at)
        teacher = OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="swap", copier=copier)
        home = memory_of(teacher.module)
        faults = 0
        for _ in range(3):
            try:
                with teacher.onload() as module:
                    assert torch.equal(module(x), want)
            except InjectedError:
                faults += 1
            assert memory_of(teacher.module) == home
            assert torch.equal(teacher.module(x), want)
        assert faults == 1
        assert teacher.report().device_bytes == 0


@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.parametrize("kind", ["host", "file", "file for a device"])
@pytest.mark.sweep(share=0.15)
def test_the_next_visit_is_right_after_an_interrupt_at_any_place(
    network: Network, x: Tensor, mode: Any, kind: str, tmp_path: Path
) -> None:
    want = network(x)
    where: dict[str, Any] = {} if kind == "host" else {"home": "file", "disk": tmp_path}
    copier = None if kind == "file" else AdversarialCopier("late")
    teacher = OffloadedTeacher(network, device="cpu", mode=mode, copier=copier, **where)

    def visit() -> Any:
        teacher.prefetch()
        with teacher.onload() as module:
            return module(x)

    interrupter = Interrupter("/hf_memopt/weights/", "/hf_memopt/transfer/")
    for place in interrupter.at_places(visit, 60):
        assert torch.equal(visit(), want), place
        assert teacher.report().device_bytes == 0, place


def test_prefetch_starts_one_copy_and_survives_an_exception(network: Network, x: Tensor) -> None:
    want = network(x)
    copier = AdversarialCopier("late")
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=copier)
    teacher.prefetch()
    teacher.prefetch()
    assert copier.bytes_to_device == teacher.report().device_bytes == teacher.report().host_bytes
    assert torch.equal(network(x), want)  # the network still works at home
    with teacher.onload() as module:
        assert torch.equal(module(x), want)
    assert copier.bytes_to_device == teacher.report().host_bytes
    assert copier.live_bytes == 0


class Copies(TorchDispatchMode):
    """A mode that lists every operation that creates or writes data, with its dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)} | {(kwargs or {}).get("dtype")} - {None}
            self.seen.append((func.__name__, dtypes))
        return func(*args, **(kwargs or {}))


def test_a_visit_is_one_copy_of_bytes_without_a_cast(network: Network) -> None:
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", dtype=torch.bfloat16, copier=SyncCopier())
    with Copies() as copies, teacher.onload():
        pass
    assert copies.seen == [("copy_.default", {torch.uint8})]
