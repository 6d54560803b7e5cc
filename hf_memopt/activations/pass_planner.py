"""Mode "auto": two passes are recorded, a plan is made after each, and made again when it no longer fits.

Recording slows a pass down, all the more the smaller its kernels are. So the first pass that follows a plan is timed as
a whole, and where it was faster the plan is made again for times in proportion.

Without a budget a pass after the recorded ones is neither recorded nor planned. On a CPU it runs without hooks, else
everything is offloaded as in those: the time without copies is the plain one, for which `max_slowdown` is meant. A plan
whose passes take longer is made again for less: first nothing is computed again, for which operations have to be noted,
then fewer storages go, and in the end everything is kept, on a CPU without hooks.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_memopt.activations.device_room import DeviceRoom
from hf_memopt.activations.offloaded_pass import OffloadedPass
from hf_memopt.activations.pass_recorder import PassRecorder
from hf_memopt.activations.plan_comparison import Comparison
from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, Plan, make_plan
from hf_memopt.activations.planner.profile import Action, Link, needs_by_backward
from hf_memopt.activations.recompute.op_tracer import OpTracer
from hf_memopt.activations.recorded_pass import (
    Makers,
    RecordedPass,
    grown,
    keeping_everything,
    offloading_fewer,
    scaled,
    with_cost_of_noting,
    without_recomputing,
)
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.activations.stats import OffloadCounters
from hf_memopt.memory.ranks import rank_among_several
from hf_memopt.transfer.clock import HostClock
from hf_memopt.transfer.link import measure_link
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)

# The first pass runs with cold caches and allocators, so its times are only good enough to start with.
_RECORDED_PASSES = 2
_MAX_CORRECTIONS = 3
# Differences from what was predicted that are put down to noise, as a share of the step.
_TOLERATED = 0.02
_SLOWER_LINK = 0.8
# What a plan may hold, as a share of the one with which the device ran out of memory, or nearly did.
_SMALLER = 0.7
# How often a plan that computes nothing again is made for less before it keeps everything.
_MAX_REDUCTIONS = 2


@dataclass(frozen=True)
class OffloadLimits:
    """What a plan has to keep to; see `ActivationOffloader`."""

    budget_bytes: int | None
    max_slowdown: float
    prefetch_ahead: int
    host_budget_bytes: int | None


class PassPlanner:
    """Records, plans and corrects one model's passes on one device.

    Args:
        device: copies from and to it.
        limits: what the user asked for.
        counters: of the offloader.
        model: names the owners of what is saved.
        on_end: called at the end of each backward.
        room: what the device has left, None where that is not known.
    """

    def __init__(
        self,
        device: DeviceState,
        limits: OffloadLimits,
        counters: OffloadCounters,
        model: nn.Module | None,
        on_end: Callable[[OffloadedPass], None],
        room: DeviceRoom | None = None,
    ) -> None:
        self.plan: Plan | None = None
        # Whether passes are left alone for good.
        self.rests = False
        self.recording: RecordedPass | None = None
        self._device, self._limits, self._room = device, limits, room
        self._counters = counters
        # Weak: offloaders know plans by model, and must not keep the models.
        self._model = None if model is None else weakref.ref(model)
        self._on_end = on_end
        self._link: Link | None = None
        # The limit that the plan in force was made for, and one that the device has been seen not to grant.
        self._limit_bytes: int | None = None
        self._out_of_reach_bytes: int | None = None
        # How much passes that were planned for the limit have held beyond it.
        self._overlap_bytes = 0
        self._num_recorded = 0
        # Plans that were made again because of times or of passes of another length; bounded, so that noise ends.
        self._num_corrections = 0
        self._begun: weakref.ref[OffloadedPass] | None = None
        self._ended: OffloadedPass | None = None
        # A pass whose end the device may still have to reach before it can be compared with the plan.
        self._watched: OffloadedPass | None = None
        # Whether a pass that followed the plan in force has been timed as a whole, without recording.
        self._is_timed = False
        self._computed_s = 0.0
        # Without a budget: whether the next pass shows how long a plain one takes, and what that shows.
        self._wants_plain = False
        self._comparison = Comparison(limits.max_slowdown, takes_turns=self._has_room_for_everything())
        self._num_operations: Mapping[Any, int] = {}
        self._num_reductions = 0
        self._ran_out = False
        self._stalled_ms = 0.0
        # Recording offloads everything and leaves an oversized arena. trim() must run twice: once to start counting
        # free blocks, once to drop those that a planned pass never took.
        self._trims_left = 2

    @property
    def is_recording(self) -> bool:
        """Return whether the next pass is to be recorded."""
        return self._num_recorded < _RECORDED_PASSES

    @property
    def open_pass(self) -> OffloadedPass | None:
        """Return the newest pass if another context goes on with it."""
        this_pass = self._begun() if self._begun is not None else None
        return this_pass if this_pass is not None and this_pass.is_open else None

    @property
    def _plan_to_follow(self) -> Plan | None:
        """Return the plan of the next pass; a plain pass has none."""
        return None if self._wants_plain else self.plan

    def makers(self) -> Makers:
        """Return the modules that perform what the plan computes again; None stands for outside of modules."""
        plan = self._plan_to_follow
        if plan is None or self.recording is None:
            return set()
        makers = self.recording.makers
        recomputed = [index for index, action in enumerate(plan.actions) if action is Action.RECOMPUTE]
        return set().union(*(makers.get(index, set()) for index in recomputed))

    def begin_pass(self, op_tracer: OpTracer | None) -> OffloadedPass:
        """Return the next pass, planned as far as earlier ones allow."""
        model = self._model() if self._model is not None else None
        recorder = None
        if self._room is not None:
            self._room.watch()
        if self.is_recording:
            recorder = PassRecorder(self._device.clock, model, self._device.held, self._room)
        this_pass = OffloadedPass(
            self._device,
            self._limits.prefetch_ahead,
            self._counters,
            plan=self._plan_to_follow,
            recorder=recorder,
            keeps_all=self._wants_plain and self._has_room_for_everything(),
            op_tracer=op_tracer,
            recording=self.recording,
            foreseen_reads=self._foreseen_reads(),
            budget_bytes=self._limit_bytes,
            is_for_these_sizes=self._limits.budget_bytes is None and self._limit_bytes is not None,
            on_end=self._end,
        )
        self._begun = weakref.ref(this_pass)
        if self._is_to_be_timed(this_pass):
            # Asking for a time between two equal marks waits until the device has reached the mark. The stalls before
            # it are counted off, so that `_end` finds those of this pass alone.
            self._device.clock.elapsed_s(this_pass.begun, this_pass.begun)
            self._newly_stalled_s()
        return this_pass

    def _foreseen_reads(self) -> list[list[int]]:
        plan = self._plan_to_follow
        if plan is None or self.recording is None or not self.recording.profile.backward_ends_s:
            return []
        return needs_by_backward(self.recording.profile, plan.actions)

    def review(self) -> None:
        """Learn from the passes since the last one, before another one begins.

        Raises:
            InfeasibleBudgetError: the first plan shows that the budget cannot be met.
        """
        # Learn from the last pass that ended, in this order: it ran out of memory; it was recorded; it saved other
        # sizes; the device has less room; its times are not the predicted ones.
        this_pass, self._ended = self._ended, None
        if self._has_run_out():
            self._plan_smaller()
        if this_pass is None or not this_pass.sizes:
            return
        if this_pass.recorder is not None:
            self.recording = this_pass.recorder.finish()
            self._num_operations = {} if this_pass.op_tracer is None else this_pass.op_tracer.num_by_module
            self._num_recorded += 1
            self._is_timed = False
            self._comparison.restart()
            self._wants_plain = not self.is_recording and self._limits.budget_bytes is None
            if not self._wants_plain:  # else the plan is made for the plain pass's time, which is not to be disturbed
                self._replan()
        elif self._wants_plain:
            self._wants_plain = False
            if self._comparison.wants_plain:
                self._compare_plain(this_pass)
            else:
                self._take_times(self._computed_s)
                self._replan()
        elif self.recording is not None and tuple(this_pass.sizes) != self.recording.sizes:
            self._adapt(this_pass.sizes)
        elif this_pass.is_other_work:
            self._record_again()
        elif self._limits.budget_bytes is not None and this_pass.plan is self.plan is not None:
            self._hold_the_budget(this_pass.peak_bytes - self._limits.budget_bytes)
        elif self._has_less_room():
            self._replan()
        elif self.plan is not None and this_pass.plan is self.plan:
            self._compare(this_pass, self.plan)
        if not self.is_recording and not self._wants_plain and self._trims_left:
            self._trims_left -= 1
            self._device.arena.trim()

    def break_off(self, ran_out: bool) -> None:
        """Note that an exception has ended a context.

        Args:
            ran_out: whether the device ran out of memory. Then what can be had again is given up, and less held from
                now on.
        """
        this_pass = self._begun() if self._begun is not None else None
        if this_pass is not None:
            this_pass.close()
        if ran_out:
            self._ran_out = True
            if this_pass is not None:
                this_pass.release()

    def _end(self, this_pass: OffloadedPass) -> None:
        self._ended = this_pass
        if self._is_to_be_timed(this_pass):
            self._computed_s = this_pass.elapsed_s() - self._newly_stalled_s()
        if self._room is not None:
            self._ran_out = self._ran_out or self._room.ran_short()
            self._room.look_back(this_pass.peak_bytes)
        self._on_end(this_pass)

    def _has_run_out(self) -> bool:
        ran_out, self._ran_out = self._ran_out, False
        return self.plan is not None and (ran_out or (self._room is not None and self._room.ran_out()))

    def _plan_smaller(self) -> None:
        assert self.plan is not None
        before = self.plan.predicted_peak_bytes
        self._out_of_reach_bytes = int(_SMALLER * before)
        logger.warning(
            "activation offloading: the device ran out of memory, or nearly did, with %s of saved activations on it; "
            "from now on they may hold at most %s",
            format_bytes(before),
            format_bytes(self._out_of_reach_bytes),
        )
        self._replan()

    def _take_times(self, plain_s: float) -> None:
        """Take the time of a pass that was not recorded, and the time that noting operations takes."""
        assert self.recording is not None
        recorded_s, num_operations = self.recording.profile.step_s, sum(self._num_operations.values())
        self._is_timed = True
        if plain_s <= 0 or recorded_s <= 0:
            return
        self._comparison.plain_s = plain_s
        if self._scale_times(plain_s, recorded_s) and num_operations:
            cost_s = max(0.0, recorded_s - plain_s) / num_operations
            self.recording = with_cost_of_noting(self.recording, self._num_operations, cost_s)

    def _compare_plain(self, this_pass: OffloadedPass) -> None:
        """Compare a plain pass with the planned one before it, if it saved the same sizes as far as that is noted."""
        assert self.recording is not None
        if tuple(this_pass.sizes) == self.recording.sizes[: len(this_pass.sizes)]:
            self._judge(self._comparison.add_plain(self._computed_s))
        else:
            self._comparison.drop_planned()

    def _judge(self, slowdown: float | None) -> None:
        """Plan for less where passes take longer than `max_slowdown` allows, by the share `slowdown`."""
        if slowdown is not None:
            logger.info(
                "activation offloading: passes take %.1f %% longer than the plain one, where max_slowdown=%g; from now "
                "on less is computed again or offloaded",
                100 * slowdown,
                self._limits.max_slowdown,
            )
            self._reduce(self._limits.max_slowdown / slowdown)

    def _reduce(self, share: float) -> None:
        """Compute nothing again; if that is so, offload a share of the storages; if that does not help, keep them all.

        The smallest stay: copying one takes as long on the host as copying a large one.
        """
        assert self.plan is not None
        assert self.recording is not None
        if Action.RECOMPUTE in self.plan.actions:
            self.recording = without_recomputing(self.recording)
            self._replan()
        elif self._num_reductions < _MAX_REDUCTIONS:
            self._num_reductions += 1
            self.recording = offloading_fewer(self.recording, self.plan.actions, share)
            self._replan()
        else:
            self._keep_everything()
            return
        if self.plan is not None and set(self.plan.actions) == {Action.KEEP}:
            self._keep_everything()

    def _keep_everything(self) -> None:
        assert self.recording is not None
        before, self.recording = self.recording, keeping_everything(self.recording)
        self._replan()
        if self.plan is None:  # for which the device has no room
            self.recording = before
            self._replan()
        self.rests = self._has_room_for_everything()

    def _has_room_for_everything(self) -> bool:
        """Return whether saved activations are in host memory in any case."""
        return self._room is None and isinstance(self._device.clock, HostClock)

    def _has_less_room(self) -> bool:
        """Whether the plan holds more than the device now has left: optimizer states are there, or other processes."""
        if self.plan is None or self._room is None or self._limits.budget_bytes is not None:
            return False
        return self.plan.predicted_peak_bytes > self._room.limit_bytes()

    def _adapt(self, sizes: list[int]) -> None:
        """Make room for larger shapes; a plan for the largest fits the smaller ones too."""
        assert self.recording is not None
        if len(sizes) != len(self.recording.sizes):
            self._record_again()  # other storages altogether
        elif any(new > old for new, old in zip(sizes, self.recording.sizes, strict=True)):
            if self._room is not None:
                self._room.grow(max(new / old for new, old in zip(sizes, self.recording.sizes, strict=True)))
            self.recording = grown(self.recording, sizes)
            self._comparison.plain_s = None  # no plain pass of this size has been timed
            self._replan()

    def _hold_the_budget(self, excess_bytes: int) -> None:
        """Plan for less where a pass held more than the budget: passes overlap, whose bytes no plan foresees."""
        if excess_bytes > 0:
            self._overlap_bytes += excess_bytes
            logger.warning(
                "activation offloading: saved activations held %s more than budget_gib allows, because passes overlap; "
                "their plans leave room for that from now on",
                format_bytes(excess_bytes),
            )
            self._replan()

    def _record_again(self) -> None:
        """Record one more pass, a few times at most: passes may alternate."""
        if self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            self._num_recorded = _RECORDED_PASSES - 1

    def _is_to_be_timed(self, this_pass: OffloadedPass) -> bool:
        """Whether a pass is the first that follows the plan; the host waits for its begin and its end."""
        if self._wants_plain:
            return this_pass.recorder is None
        has_time_of_its_own = not isinstance(self._device.clock, HostClock)  # whose copies never run beside compute
        follows_plan = this_pass.recorder is None and this_pass.plan is not None and this_pass.plan is self.plan
        return has_time_of_its_own and follows_plan and not self._is_timed

    def _compare(self, this_pass: OffloadedPass, plan: Plan) -> None:
        """Plan again where passes are not as they were predicted."""
        has_time_of_its_own = not isinstance(self._device.clock, HostClock)
        if has_time_of_its_own and not self._is_timed:
            self._is_timed = True
            self._adjust_times(plan)
            return
        self._watched = self._watched or this_pass
        # A host that runs ahead asks again when the next pass begins.
        if self._device.clock.reached(self._watched.ended):
            watched, self._watched = self._watched, None
            if has_time_of_its_own:
                self._correct(watched, plan)
            if self.plan is plan:
                self._judge(self._comparison.add_planned(watched.elapsed_s()))
                self._wants_plain = self._comparison.wants_plain

    def _adjust_times(self, plan: Plan) -> None:
        """Plan for the times of a pass that was not recorded."""
        computed_s, expected_s = self._computed_s, plan.plain_step_s + plan.recompute_s
        if computed_s > 0 and self._scale_times(computed_s, expected_s):
            self._replan()
            self._trims_left = 2  # it may need less host memory

    def _scale_times(self, computed_s: float, expected_s: float) -> bool:
        """Take the recorded times in proportion to a pass that was not recorded; return whether they differ."""
        assert self.recording is not None
        if abs(computed_s - expected_s) <= _TOLERATED * expected_s:
            return False
        figures = 1e3 * computed_s, 1e3 * expected_s
        logger.info("activation offloading: a pass computes for %.1f ms; recorded, it took %.1f ms", *figures)
        self.recording = scaled(self.recording, computed_s / expected_s)
        return True

    def _correct(self, this_pass: OffloadedPass, plan: Plan) -> None:
        """Plan for a slower link when compute has waited longer than predicted, and the pass taken longer."""
        # Stalls of later passes, if the host is ahead, are among the new ones; the time of the pass is its own.
        excess_s = min(self._newly_stalled_s() - plan.stall_s, this_pass.elapsed_s() - plan.predicted_step_s)
        if excess_s > _TOLERATED * plan.predicted_step_s and self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            assert self._link is not None
            self._link = Link(
                _SLOWER_LINK * self._link.to_host_bytes_per_s, _SLOWER_LINK * self._link.to_device_bytes_per_s
            )
            logger.info("activation offloading: compute waited %.1f ms longer than predicted", 1e3 * excess_s)
            self._replan()

    def _newly_stalled_s(self) -> float:
        """How long compute has waited for copies since the last call or plan."""
        before, self._stalled_ms = self._stalled_ms, self._device.copier.stall_ms()
        return 1e-3 * (self._stalled_ms - before)

    def _replan(self) -> None:
        if self._link is None:
            self._link = Link(*measure_link(self._device.copier, self._device.clock))
        is_first = self.plan is None
        self._limit_bytes = self._limit()
        if self._limits.budget_bytes is None:
            self.plan = self._plan_for_the_device()
        else:
            self.plan = self._plan_for_the_budget(is_first)
        self._watched = None
        self._comparison.restart()
        self._newly_stalled_s()
        if self.plan is not None:
            logger.info("activation offloading: %s", self.plan.summary())

    def _limit(self) -> int | None:
        limit_bytes = self._limits.budget_bytes
        if limit_bytes is None and self._room is not None:
            limit_bytes = max(0, self._room.limit_bytes())
        limits = [limit for limit in (limit_bytes, self._out_of_reach_bytes) if limit is not None]
        return max(0, min(limits) - self._overlap_bytes) if limits else None

    def _plan_for_the_budget(self, is_first: bool) -> Plan:
        try:
            return self._make_plan(self._limit_bytes)
        except InfeasibleBudgetError as error:
            if is_first or self._overlap_bytes:
                needed_bytes = error.smallest_bytes + self._overlap_bytes
                budget_bytes = error.budget_bytes + self._overlap_bytes
                raise InfeasibleBudgetError(budget_bytes, needed_bytes, rank=rank_among_several()) from None
            logger.warning("%s; going on with the smallest", str(error))
            return self._make_plan(error.smallest_bytes)

    def _plan_for_the_device(self) -> Plan | None:
        """The plan that the accepted slowdown allows if it fits, else the fastest that does, else none.

        Without one everything is offloaded, as while recording, which was seen to fit.
        """
        try:
            return self._make_plan(None, self._limit_bytes)
        except InfeasibleBudgetError as error:
            logger.info("activation offloading: %s; until then everything is offloaded", str(error))
            return None

    def _make_plan(self, budget_bytes: int | None, device_limit_bytes: int | None = None) -> Plan:
        assert self.recording is not None
        assert self._link is not None
        limits: dict[str, Any] = vars(self._limits) | {"budget_bytes": budget_bytes}
        return make_plan(self.recording.profile, self._link, device_limit_bytes=device_limit_bytes, **limits)
