"""Tests of mode "auto" on a device with simulated time: slow recording, stalls, a host that is ahead."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations import plan_maker
from hf_memopt.activations.planner.offload_plan import OffloadPlan, make_plan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.transfer import lower_memory, memories_below
from hf_memopt.transfer.clock import HostClock
from hf_memopt.transfer.tier import Tier

pytestmark = pytest.mark.usefixtures("quick_plans")

LAYER_S = 1e-3
NUM_LAYERS = 6
NUM_RECORDED = 2


class Mark(NamedTuple):
    moment_s: float
    step: int


class Device:
    """The clock and the copier of one device, behind the host by `lag` steps."""

    def __init__(self, lag: int = 0) -> None:
        self.now_s = self.stalled_s = 0.0
        self.step = 0
        self.layer_s = LAYER_S
        self.lag = lag
        self.copier = AdversarialCopier("late")
        self.copier.stall_ms = lambda: 1e3 * self.stalled_s

    def mark(self) -> Mark:
        return Mark(self.now_s, self.step)

    def reached(self, mark: Mark) -> bool:
        return self.step - mark.step > self.lag

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return end.moment_s - start.moment_s

    def compute(self) -> None:
        self.now_s += self.layer_s

    def stall(self, seconds: float) -> None:
        self.now_s += seconds
        self.stalled_s += seconds


class Layers(nn.Module):
    """Layers that each take the device's time in forward and in backward."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self._device.compute()
            x.register_hook(lambda _: self._device.compute())
        return x


class Run:
    """Training on a device with simulated time, with the bandwidths given to the planner."""

    def __init__(self, device: Device, patch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.bandwidths: list[float] = []
        self.steps_s: list[float] = []
        self.model = Layers(device)
        patch.setattr(lower_memory, "measure_link", lambda copier, clock: (1e9, 1e9))
        patch.setattr(plan_maker, "make_plan", self._plan)
        patch.setattr(memories_below, "clock_for", lambda _: device)
        self.offloader = ActivationOffloader(offload_threshold_mb=0, copier=device.copier)

    def _plan(self, profile: Profile, tiers: Sequence[Tier], **limits: Any) -> OffloadPlan:
        self.bandwidths.append(tiers[0].write_bytes_per_s)
        self.steps_s.append(profile.step_s)
        return make_plan(profile, tiers, **limits)

    def go(self, num_steps: int, stall_s: float = 0.0, stall_between_s: float = 0.0, batch_size: int = 4) -> None:
        for _ in range(num_steps):
            with self.offloader.offload_context(self.model):
                loss = self.model(torch.ones(batch_size, 8)).sum()
            self.device.stall(stall_s)
            loss.backward()
            self.device.stall(stall_between_s)
            self.device.step += 1


@pytest.mark.parametrize("lag", [0, 1])
def test_times_that_recording_has_inflated_are_scaled_down_once(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lag)
    run = Run(device, monkeypatch)
    device.layer_s = 3 * LAYER_S
    run.go(NUM_RECORDED)
    device.layer_s = LAYER_S
    run.go(6)
    recorded_s = run.steps_s[0]
    assert run.steps_s == pytest.approx([recorded_s, recorded_s / 3], rel=0.1)  # after the first and the plain pass
    (planner,) = next(iter(run.offloader._planners.values())).values()
    assert planner.plan.predicted_step_s == pytest.approx(run.offloader.stats.measured_step_ms / 1e3, rel=0.02)


class Noted(Layers):
    """Layers that take more time while their operations are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            self._device.now_s += 0.3 * NUM_LAYERS * LAYER_S
        return super().forward(x)


def slowdown_of(run: Run, num_steps: int) -> float:
    """Run some steps, and return the last one's slowdown over the time of all layers."""
    run.go(num_steps)
    return run.offloader.stats.measured_step_ms / 1e3 / (2 * NUM_LAYERS * LAYER_S) - 1


def test_the_time_of_noting_operations_is_a_plans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the time of recording operations counts as a cost of recomputation."""
    run = Run(Device(), monkeypatch)
    run.model = Noted(run.device)
    assert slowdown_of(run, 5) < 0.05
    assert slowdown_of(run, 8) < 0.05


def test_a_plan_that_is_slower_than_allowed_is_made_again_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check plans on a device whose copies and recomputation take longer than measured."""
    run = Run(Device(), monkeypatch)
    run.offloader = ActivationOffloader(offload_threshold_mb=0, copier=run.device.copier, max_slowdown=1.0)
    run.go(NUM_RECORDED + 1)
    run.device.layer_s = 4 * LAYER_S
    worked: list[int] = []
    for _ in range(16):
        before = run.offloader.stats
        run.go(1)
        after = run.offloader.stats
        worked.append(after.bytes_moved + after.bytes_recomputed - before.bytes_moved - before.bytes_recomputed)
        run.device.layer_s = (4 if worked[-1] else 1) * LAYER_S
    assert worked[0] > worked[2] > 0  # each plan lasts two passes, then moves a third, then nothing
    assert worked == sorted(worked, reverse=True)
    assert worked[-1] == 0


def test_a_plan_that_was_fast_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a slower device, such as a hot one, changes no plan."""
    run = Run(Device(), monkeypatch)
    run.go(NUM_RECORDED + 1 + 3)
    (planner,) = next(iter(run.offloader._planners.values())).values()
    plan = planner.plan
    run.device.layer_s = 2 * LAYER_S
    run.go(6)
    assert planner.plan is plan


def test_a_larger_pass_is_not_compared_with_a_smaller_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Device(), monkeypatch)
    run.go(NUM_RECORDED + 1)
    run.device.layer_s = 2 * LAYER_S
    run.go(1, batch_size=8)
    (planner,) = next(iter(run.offloader._planners.values())).values()
    run.go(6, batch_size=8)
    assert len(run.steps_s) == 3  # after the first, the plain and the larger pass
    assert Action.OFFLOAD in planner.plan.actions


class HostDevice(Device, HostClock):
    """A CPU, whose device memory is host memory."""


class Watched(Layers):
    """Layers that take four times as long in backward if saved tensors are packed until forward ends."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.are_packed: list[bool] = []
        self.collects: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.collects.append(gc.isenabled())
        self._device.layer_s = LAYER_S
        x = super().forward(x)
        self.are_packed.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        self._device.layer_s = (4 if self.are_packed[-1] else 1) * LAYER_S
        return x


def test_in_host_memory_nothing_is_done_where_hooks_alone_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(HostDevice(), monkeypatch)
    run.model = Watched(run.device)
    run.go(NUM_RECORDED + 1)
    # The plain pass is packed only until its start is known.
    assert run.model.are_packed == [True] * NUM_RECORDED + [False]
    run.go(20)
    assert run.model.collects == [False] * NUM_RECORDED + [True] * 21
    followed = run.model.are_packed[NUM_RECORDED + 1 :]
    num_tried = sum(followed)
    assert followed == [True, False] * num_tried + [False] * (20 - 2 * num_tried)  # planned and plain in turn
    moved_bytes = run.offloader.stats.bytes_moved
    run.go(1)
    assert run.offloader.stats.bytes_moved == moved_bytes > 0
    (planner,) = next(iter(run.offloader._planners.values())).values()
    assert set(planner.plan.actions) == {Action.KEEP}


def test_a_plain_pass_that_took_too_long_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a plain pass slowed by other processes, which later plain passes correct."""
    run = Run(HostDevice(), monkeypatch)
    run.model = Watched(run.device)
    run.go(NUM_RECORDED)
    elapsed = run.device.elapsed_s
    run.device.elapsed_s = lambda start, end: 3 * elapsed(start, end)
    run.go(1)
    run.device.elapsed_s = elapsed
    run.go(20)
    assert not any(run.model.are_packed[-3:])


def test_a_plain_pass_of_another_size_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check plain passes of smaller batches only, which take less time."""
    run = Run(HostDevice(), monkeypatch)
    run.go(NUM_RECORDED + 1)
    for _ in range(20):
        run.device.layer_s = LAYER_S
        run.go(1)
        run.device.layer_s = LAYER_S / 4
        run.go(1, batch_size=1)
    (planner,) = next(iter(run.offloader._planners.values())).values()
    assert not planner.rests
    assert Action.OFFLOAD in planner.plan.actions


def test_times_that_were_right_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Device(), monkeypatch)
    run.go(8)
    assert len(run.steps_s) == NUM_RECORDED


def test_stalls_are_not_taken_for_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    run = Run(device, monkeypatch)
    device.layer_s = 3 * LAYER_S
    run.go(NUM_RECORDED)
    device.layer_s = LAYER_S
    run.go(2, stall_s=5 * LAYER_S)
    assert run.steps_s[-1] == pytest.approx(run.steps_s[0] / 3, rel=0.1)


def test_stalls_between_passes_belong_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    run = Run(device, monkeypatch)
    device.layer_s = 3 * LAYER_S
    run.go(NUM_RECORDED, stall_between_s=99 * LAYER_S)
    device.layer_s = LAYER_S
    run.go(4, stall_between_s=99 * LAYER_S)
    assert run.steps_s[-1] == pytest.approx(run.steps_s[0] / 3, rel=0.1)
    assert set(run.bandwidths) == {1e9}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_stalls_beyond_the_prediction_make_the_link_slower(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Device(lag), monkeypatch)
    run.go(NUM_RECORDED)
    run.go(20, stall_s=5 * LAYER_S)
    # Passes that are still too slow are planned again later, for less.
    assert run.bandwidths[:5] == pytest.approx([1e9, 1e9, 0.8e9, 0.64e9, 0.512e9])
    assert set(run.bandwidths[5:]) <= {run.bandwidths[4]}


def test_a_pass_that_took_longer_without_stalling_says_nothing_about_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lag=1)
    run = Run(device, monkeypatch)
    run.go(NUM_RECORDED + 1)
    device.layer_s = 2 * LAYER_S
    run.go(6)
    assert set(run.bandwidths) == {1e9}
