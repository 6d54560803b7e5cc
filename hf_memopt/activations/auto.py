"""Mode "auto": two passes are recorded, a plan is made after each, and remade when it stops to fit."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_memopt.activations.bandwidth import measure_link
from hf_memopt.activations.engine import Engine
from hf_memopt.activations.planner import InfeasibleBudgetError, Plan, make_plan
from hf_memopt.activations.recording import Recorder, Recording
from hf_memopt.activations.schedule import ForwardPass
from hf_memopt.activations.timeline import Action, Link
from hf_memopt.transfer.clock import HostClock

logger = logging.getLogger(__name__)

# The first pass runs with cold caches and allocators, so its times are only good enough to start with.
_RECORDED_PASSES = 2
_MAX_CORRECTIONS = 3
# Stalls beyond the predicted ones that are put down to noise, as a share of the step.
_TOLERATED_STALL = 0.02
_SLOWER_LINK = 0.8


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to; see `ActivationOffloader`."""

    budget_bytes: int | None
    max_slowdown: float
    prefetch_ahead: int
    host_budget_bytes: int | None


class AutoMode:
    """The plan for one model's forward passes on one device.

    Args:
        engine: of the device.
        limits: what the user asked for.
        model: names the owners of what is saved.
        on_end: called with every pass whose backward is over.
    """

    def __init__(
        self, engine: Engine, limits: Limits, model: nn.Module | None, on_end: Callable[[ForwardPass], None]
    ) -> None:
        self.plan: Plan | None = None
        self.recording: Recording | None = None
        self._engine, self._limits = engine, limits
        # Weak: offloaders know plans by model, and must not keep the models.
        self._model = None if model is None else weakref.ref(model)
        self._on_end = on_end
        self._link: Link | None = None
        self._num_recorded = 0
        self._num_corrections = 0
        self._ended: ForwardPass | None = None
        self._stalled_ms = 0.0
        # Recording took host memory for everything. The first call begins to count, the second knows a planned pass.
        self._trims_left = 2

    @property
    def is_recording(self) -> bool:
        """Whether the next pass is to be recorded."""
        return self._num_recorded < _RECORDED_PASSES

    @property
    def recomputes(self) -> bool:
        """Whether the plan computes storages again."""
        return self.plan is not None and Action.RECOMPUTE in self.plan.actions

    def begin_pass(self) -> ForwardPass:
        """The next pass, planned as far as earlier ones allow."""
        model = self._model() if self._model is not None else None
        recorder = Recorder(self._engine.clock, model) if self.is_recording else None
        return ForwardPass(
            self._engine,
            self._limits.prefetch_ahead,
            plan=self.plan,
            recorder=recorder,
            recording=self.recording,
            budget_bytes=self._limits.budget_bytes,
            on_end=self._end,
        )

    def review(self) -> None:
        """Learn from the last pass whose backward is over.

        Raises:
            InfeasibleBudgetError: the first plan shows that the budget cannot be met.
        """
        forward, self._ended = self._ended, None
        if forward is None or not forward.sizes:
            return
        if forward.recorder is not None:
            self.recording = forward.recorder.finish(forward.ended)
            self._num_recorded += 1
            self._replan()
        elif self.recording is not None and tuple(forward.sizes) != self.recording.sizes:
            self._adapt(forward.sizes)
        elif self.plan is not None and self._engine.clock.reached(forward.ended):
            self._correct(self.plan)
        if not self.is_recording and self._trims_left:
            self._trims_left -= 1
            self._engine.arena.trim()

    def _end(self, forward: ForwardPass) -> None:
        if forward.recorder:
            forward.recorder.end()
        self._ended = forward
        self._on_end(forward)

    def _adapt(self, sizes: list[int]) -> None:
        """Make room for larger shapes; a plan for the largest fits the smaller ones too."""
        assert self.recording is not None
        if len(sizes) != len(self.recording.sizes):
            if self._num_corrections < _MAX_CORRECTIONS:
                self._num_corrections += 1
                self._num_recorded = _RECORDED_PASSES - 1
        elif any(new > old for new, old in zip(sizes, self.recording.sizes, strict=True)):
            self.recording = _grown(self.recording, sizes)
            self._replan()

    def _correct(self, plan: Plan) -> None:
        """Plan for a slower link when compute has waited longer than predicted."""
        if isinstance(self._engine.clock, HostClock):  # whose copies never run beside compute
            return
        stalled_ms = self._engine.copier.stall_ms()
        excess_s = 1e-3 * (stalled_ms - self._stalled_ms) - plan.stall_s
        self._stalled_ms = stalled_ms
        if excess_s > _TOLERATED_STALL * plan.predicted_step_s and self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            assert self._link is not None
            self._link = Link(
                _SLOWER_LINK * self._link.to_host_bytes_per_s, _SLOWER_LINK * self._link.to_device_bytes_per_s
            )
            logger.info("activation offloading: compute waited %.1f ms longer than predicted", 1e3 * excess_s)
            self._replan()

    def _replan(self) -> None:
        assert self.recording is not None
        if self._link is None:
            self._link = measure_link(self._engine.copier, self._engine.clock)
        is_first = self.plan is None
        try:
            self.plan = self._make_plan(self._limits.budget_bytes)
        except InfeasibleBudgetError as error:
            if is_first:
                raise
            logger.warning("%s; going on with the smallest", error)
            self.plan = self._make_plan(error.smallest_bytes)
        self._stalled_ms = self._engine.copier.stall_ms()
        logger.info("activation offloading: %s", self.plan.summary())

    def _make_plan(self, budget_bytes: int | None) -> Plan:
        limits: dict[str, Any] = {**vars(self._limits), "budget_bytes": budget_bytes}
        assert self.recording is not None
        assert self._link is not None
        return make_plan(self.recording.profile, self._link, **limits)


def _grown(recording: Recording, sizes: list[int]) -> Recording:
    """The recording of a pass as large as the largest seen, its times in proportion."""
    largest = tuple(max(new, old) for new, old in zip(sizes, recording.sizes, strict=True))
    ratio = sum(largest) / sum(recording.sizes)
    storages = [
        replace(
            storage,
            num_bytes=largest[index] if index < len(largest) else round(ratio * storage.num_bytes),
            saved_at_s=ratio * storage.saved_at_s,
            uses_s=tuple(ratio * used_at for used_at in storage.uses_s),
            recompute_s=None if storage.recompute_s is None else ratio * storage.recompute_s,
        )
        for index, storage in enumerate(recording.profile.storages)
    ]
    profile = replace(recording.profile, storages=tuple(storages), step_s=ratio * recording.profile.step_s)
    return Recording(profile, largest, recording.owners)
