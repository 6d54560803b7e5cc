"""Tests of mode="auto", which streams first, measures two optimizer steps, chooses once, and logs its estimate."""

import gc
import logging
import weakref

import pytest
import torch
from adversarial_copier import AdversarialCopier
from counted_allocator import FakeCounters
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.clock import HostClock
from hf_memopt.weights import OffloadedTeacher, offload
from hf_memopt.weights.homes import home as homes

MIB = 2**20
NUM_LAYERS = 16


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> FakeCounters:
    """Counters in an accelerator's place, so that `auto` measures on a CPU."""
    counters = FakeCounters(total_bytes=64 * MIB)
    monkeypatch.setattr(offload, "counters_for", lambda device: counters)
    monkeypatch.setattr(offload, "clock_for", lambda device: HostClock())
    monkeypatch.setattr(homes, "readable_in_place", lambda master, device: master)
    return counters


@pytest.fixture
def network() -> nn.Module:
    """A network of 4 MiB of weights in layers of 256 KiB, each used twice."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers, *layers)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(1))


class Training:
    """A student whose activations take `outside_bytes`, and a teacher whose own pass takes `inside_bytes`."""

    def __init__(
        self,
        network: nn.Module,
        counters: FakeCounters,
        outside_bytes: int,
        inside_bytes: int,
        copier: Copier | None = None,
    ) -> None:
        self.teacher = OffloadedTeacher(network, device="cuda", copier=copier or SyncCopier())
        self._counters = counters
        self._outside_bytes, self._inside_bytes = outside_bytes, inside_bytes
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        self._optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(self, x: Tensor, update: bool = True) -> Tensor:
        with self.teacher.onload() as module, torch.no_grad():
            output = module(x)
            self._use(self._inside_bytes)
        self._use(self._outside_bytes)
        if update:
            self._optimizer.step()
        return output

    def _use(self, num_bytes: int) -> None:
        self._counters.move(num_bytes)
        self._counters.move(-num_bytes)


@pytest.mark.parametrize(
    ("outside_mib", "inside_mib", "mode"), [(40, 10, "resident"), (58, 10, "swap"), (60, 60, "stream")]
)
def test_headroom_decides_and_outputs_do_not_change(
    network: nn.Module,
    counters: FakeCounters,
    x: Tensor,
    caplog: pytest.LogCaptureFixture,
    outside_mib: int,
    inside_mib: int,
    mode: str,
) -> None:
    with torch.no_grad():
        want = network(x)
    training = Training(network, counters, outside_mib * MIB, inside_mib * MIB)
    assert training.teacher.report().mode == "stream"
    assert training.teacher.report().predicted_stall_ms is None
    with caplog.at_level(logging.INFO, "hf_memopt.weights.strategies.auto"):
        for _ in range(5):
            assert torch.equal(training.step(x), want)
    report = training.teacher.report()
    assert report.mode == mode
    assert len([record for record in caplog.records if record.name == "hf_memopt.weights.strategies.auto"]) == 1
    assert f"teacher: {mode} from now on" in caplog.text
    assert report.reason in caplog.text
    assert report.predicted_device_bytes is not None
    assert 0 < report.peak_device_bytes <= report.predicted_device_bytes
    assert report.stall_ms_per_visit is not None
    assert report.predicted_stall_ms is not None
    assert (report.host_bytes == 0) == (mode == "resident")
    assert counters.num_resets == 2 * 2  # two for each measured visit


def test_a_resident_teacher_gives_the_host_copy_back(
    network: nn.Module, counters: FakeCounters, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = AdversarialCopier("late")

    class WaitingClock(HostClock):
        """A clock whose times wait for the device."""

        def elapsed_s(self, start: float, end: float) -> float:
            copier.num_reached = copier.num_operations
            return super().elapsed_s(start, end)

    monkeypatch.setattr(offload, "clock_for", lambda device: WaitingClock())
    training = Training(network, counters, 10 * MIB, 10 * MIB, copier)
    master = StorageWeakRef(training.teacher._placement._undecided[1]._master.untyped_storage())
    while training.teacher.report().mode != "resident":
        assert not master.expired()
        training.step(x)
    gc.collect()
    assert master.expired()


def test_nothing_is_chosen_before_the_optimizer_has_its_state(
    network: nn.Module, counters: FakeCounters, x: Tensor
) -> None:
    training = Training(network, counters, 10 * MIB, 10 * MIB)
    for update in (False, False, False, True, False, True):
        assert training.teacher.report().mode == "stream"
        training.step(x, update)
    training.step(x)
    assert training.teacher.report().mode == "resident"


def test_a_peak_between_visits_counts_wherever_it_was(network: nn.Module, counters: FakeCounters, x: Tensor) -> None:
    training = Training(network, counters, 10 * MIB, 10 * MIB)
    training.step(x)
    training._use(59 * MIB)
    training.step(x)
    training.step(x)
    assert training.teacher.report().mode == "swap"


def test_the_hot_set_takes_the_room_that_there_is(network: nn.Module, counters: FakeCounters, x: Tensor) -> None:
    training = Training(network, counters, 60 * MIB, 60 * MIB)
    for _ in range(2):
        training.step(x)
    ring_bytes = training.teacher.report().peak_device_bytes
    training.step(x)
    report = training.teacher.report()
    assert ring_bytes == 2 * MIB // 4
    room = int(0.95 * 64 * MIB) - 60 * MIB + ring_bytes
    assert ring_bytes < report.peak_device_bytes <= room


def test_a_teacher_that_is_gone_before_the_choice_leaves_nothing(network: nn.Module, counters: FakeCounters) -> None:
    training = Training(network, counters, MIB, MIB)
    placement = weakref.ref(training.teacher._placement)
    optimizer = training._optimizer
    del training
    gc.collect()
    assert placement() is None
    optimizer.step()


def test_a_device_without_counters_swaps(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "counters_for", lambda device: None)
    report = OffloadedTeacher(network, device="mps", copier=SyncCopier()).report()
    assert report.mode == "swap"
    assert "counts no memory on mps" in report.reason
