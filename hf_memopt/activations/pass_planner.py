"""Mode "auto": two passes are recorded, a plan is made after each, and made again when it no longer fits.

Recording slows a pass down, the more the smaller its kernels are. So the first pass that follows a plan is timed as a
whole, and where it was faster the plan is made again for times in proportion.

Without a budget a pass after the recorded ones is plain: on a CPU without hooks, else everything is offloaded. Its time
without copies is the one for which `max_slowdown` is meant. A plan whose passes take longer is made again for less:
first nothing is computed again, for which operations have to be noted, then fewer storages go, and in the end
everything is kept, on a CPU without hooks.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hf_memopt.activations.offloaded_pass import OffloadedPass
from hf_memopt.activations.pass_recorder import (
    Makers,
    PassRecorder,
    RecordedPass,
    grown,
    keeping_everything,
    offloading_fewer,
    without_recomputing,
)
from hf_memopt.activations.pass_times import PassTimes
from hf_memopt.activations.plan_maker import DeviceRoom, OffloadLimits, PlanMaker
from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.planner.profile import Action
from hf_memopt.activations.recompute.op_tracer import OpTracer
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.activations.stats import OffloadCounters
from hf_memopt.transfer.clock import HostClock

logger = logging.getLogger(__name__)

# The first pass runs with cold caches and allocators: its times are only good enough to start with.
_RECORDED_PASSES = 2
_MAX_CORRECTIONS = 3
# Times that a plan without recomputation is made for less before it keeps everything.
_MAX_REDUCTIONS = 2


class PassPlanner:
    """Records, plans and corrects one model's passes on one device; `room` is None where it is not known."""

    def __init__(
        self,
        device: DeviceState,
        limits: OffloadLimits,
        counters: OffloadCounters,
        model: nn.Module | None,
        on_end: Callable[[OffloadedPass], None],
        room: DeviceRoom | None = None,
    ) -> None:
        self.plan: OffloadPlan | None = None
        # Whether passes are left alone for good.
        self.rests = False
        self.recording: RecordedPass | None = None
        self._device, self._limits, self._room = device, limits, room
        self._counters = counters
        # Offloaders know plans by model, and must not keep the models.
        self._model = None if model is None else weakref.ref(model)
        self._on_end = on_end
        self._maker = PlanMaker(device, limits, room)
        self._times = PassTimes(device, limits.max_slowdown, takes_turns=self._has_room_for_everything())
        self._num_recorded = 0
        # Plans made again because of times or of passes of another length; bounded, so that noise ends.
        self._num_corrections = self._num_reductions = 0
        self._begun: weakref.ref[OffloadedPass] | None = None
        self._ended: OffloadedPass | None = None
        # Whether the next pass shows how long a plain one takes.
        self._wants_plain = False
        self._num_operations: Mapping[Any, int] = {}
        self._ran_out = False
        # Recording leaves more memory below than is needed. trim() must run twice: to start counting free blocks, and
        # to drop those that a planned pass never took.
        self._trims_left = 2

    @property
    def is_recording(self) -> bool:
        return self._num_recorded < _RECORDED_PASSES

    @property
    def open_pass(self) -> OffloadedPass | None:
        this_pass = self._begun() if self._begun is not None else None
        return this_pass if this_pass is not None and this_pass.is_open else None

    @property
    def _plan_to_follow(self) -> OffloadPlan | None:
        return None if self._wants_plain else self.plan

    def makers(self) -> Makers:
        """Return the modules whose operations the plan repeats; None stands for outside of modules."""
        plan = self._plan_to_follow
        if plan is None or self.recording is None:
            return set()
        makers = self.recording.makers
        recomputed = [index for index, action in enumerate(plan.actions) if action is Action.RECOMPUTE]
        return set().union(*(makers.get(index, set()) for index in recomputed))

    def begin_pass(self, op_tracer: OpTracer | None) -> OffloadedPass:
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
            budget_bytes=self._maker.limit_bytes,
            is_for_these_sizes=not self._maker.has_budget and self._maker.limit_bytes is not None,
            on_end=self._end,
        )
        self._begun = weakref.ref(this_pass)
        if self._is_to_be_timed(this_pass):
            self._times.start_timing(this_pass)
        return this_pass

    def review(self) -> None:
        """Learn from the last pass that ended; an `InfeasibleBudgetError` if no plan meets the budget."""
        # The order matters: out of memory, recorded, other sizes, less room, other times than predicted.
        this_pass, self._ended = self._ended, None
        if self._has_run_out():
            assert self.plan is not None
            assert self.recording is not None
            self._maker.note_shortage(self.plan)
            self._replan(self.recording)
        if this_pass is None or not this_pass.sizes:
            return
        if this_pass.recorder is not None:
            self._take_recording(this_pass, this_pass.recorder)
        elif self.recording is not None:
            self._take_unrecorded(this_pass, self.recording)
        if not self.is_recording and not self._wants_plain and self._trims_left:
            self._trims_left -= 1
            self._device.trim()

    def _take_unrecorded(self, this_pass: OffloadedPass, recording: RecordedPass) -> None:
        if self._wants_plain:
            self._take_plain(this_pass, recording)
        elif tuple(this_pass.sizes) != recording.sizes:
            self._adapt(this_pass.sizes, recording)
        elif this_pass.is_other_work:
            self._record_again()
        elif self._maker.has_budget and this_pass.plan is self.plan is not None:
            if self._maker.note_overlap(this_pass.peak_bytes):
                self._replan(recording)
        elif self.plan is not None and self._maker.has_less_room_than(self.plan):
            self._replan(recording)
        elif self.plan is not None and this_pass.plan is self.plan:
            self._compare(this_pass, self.plan, recording)

    def break_off(self, ran_out: bool) -> None:
        """Note that an exception has ended a context; where memory ran out, later plans hold less."""
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
            self._times.stop_timing(this_pass)
        if self._room is not None:
            self._ran_out = self._ran_out or self._room.ran_short()
            self._room.look_back(this_pass.peak_bytes)
        self._on_end(this_pass)

    def _is_to_be_timed(self, this_pass: OffloadedPass) -> bool:
        if this_pass.recorder is not None:
            return False
        return self._wants_plain or (self._times.wants_whole and this_pass.plan is self.plan is not None)

    def _has_run_out(self) -> bool:
        ran_out, self._ran_out = self._ran_out, False
        return self.plan is not None and (ran_out or (self._room is not None and self._room.ran_out()))

    def _has_room_for_everything(self) -> bool:
        """Return whether saved activations are in host memory in any case."""
        return self._room is None and isinstance(self._device.clock, HostClock)

    def _take_recording(self, this_pass: OffloadedPass, recorder: PassRecorder) -> None:
        self.recording = recording = recorder.finish()
        self._num_operations = {} if this_pass.op_tracer is None else this_pass.op_tracer.num_by_module
        self._num_recorded += 1
        self._times.begin_recording()
        self._wants_plain = not self.is_recording and not self._maker.has_budget
        if not self._wants_plain:  # else the plan is made for the plain pass's time, which is not to be disturbed
            self._replan(recording)

    def _record_again(self) -> None:
        """Record one more pass, a few times at most: passes may alternate."""
        if self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            self._num_recorded = _RECORDED_PASSES - 1

    def _replan(self, recording: RecordedPass) -> None:
        self.recording = recording
        self.plan = self._maker.make(recording.profile, before=self.plan)
        self._times.begin_plan()

    def _take_plain(self, this_pass: OffloadedPass, recording: RecordedPass) -> None:
        self._wants_plain = False
        if self._times.comparison.wants_plain:
            self._judge(self._times.compare_plain(this_pass, recording), recording)
        else:
            self._replan(self._times.take_plain(recording, self._num_operations))

    def _adapt(self, sizes: list[int], recording: RecordedPass) -> None:
        """Make room for larger shapes; a plan for the largest fits the smaller ones too."""
        if len(sizes) != len(recording.sizes):
            self._record_again()  # other storages altogether
        elif any(new > old for new, old in zip(sizes, recording.sizes, strict=True)):
            if self._room is not None:
                self._room.grow(max(new / old for new, old in zip(sizes, recording.sizes, strict=True)))
            self._times.comparison.plain_s = None  # it was of another size
            self._replan(grown(recording, sizes))

    def _compare(self, this_pass: OffloadedPass, plan: OffloadPlan, recording: RecordedPass) -> None:
        if self._times.wants_whole:
            timed = self._times.take_whole(recording, plan)
            if timed is not None:
                self._replan(timed)
                self._trims_left = 2  # it may need less memory below the device
            return
        ended = self._times.next_ended(this_pass)
        if ended is None:
            return
        excess_s = self._times.excess_wait_s(ended, plan)
        if excess_s and self._num_corrections < _MAX_CORRECTIONS:
            logger.info("activation offloading: compute waited %.1f ms longer than predicted", 1e3 * excess_s)
            self._num_corrections += 1
            self._maker.note_slow_copies()
            self._replan(recording)
        else:
            self._judge(self._times.comparison.add_planned(ended.elapsed_s()), recording)
            self._wants_plain = self._times.comparison.wants_plain

    def _judge(self, slowdown: float | None, recording: RecordedPass) -> None:
        """Plan for less where passes take longer than `max_slowdown` allows, by the share `slowdown`."""
        if slowdown is not None:
            logger.info(
                "activation offloading: passes take %.1f %% longer than the plain one, where max_slowdown=%g; from now "
                "on less is computed again or offloaded",
                100 * slowdown,
                self._limits.max_slowdown,
            )
            self._reduce(self._limits.max_slowdown / slowdown, recording)

    def _reduce(self, share: float, recording: RecordedPass) -> None:
        """Compute nothing again; if that is so, offload a share of the storages; if that fails, keep them all."""
        assert self.plan is not None
        if Action.RECOMPUTE in self.plan.actions:
            self._replan(without_recomputing(recording))
        elif self._num_reductions < _MAX_REDUCTIONS:
            self._num_reductions += 1
            # The smallest stay: to start the copy of a small one takes as long as that of a large one.
            self._replan(offloading_fewer(recording, self.plan.actions, share))
        else:
            self._keep_everything()
            return
        if self.plan is not None and set(self.plan.actions) == {Action.KEEP}:
            self._keep_everything()

    def _keep_everything(self) -> None:
        assert self.recording is not None
        before = self.recording
        self._replan(keeping_everything(before))
        if self.plan is None:  # for which the device has no room
            self._replan(before)
        self.rests = self._has_room_for_everything()
