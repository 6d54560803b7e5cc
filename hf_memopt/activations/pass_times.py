"""Times of whole passes, compared with a plan's and with those of plain passes."""

import logging
import weakref
from collections.abc import Mapping

from torch import nn

from hf_memopt.activations.offloaded_pass import OffloadedPass
from hf_memopt.activations.pass_recorder import RecordedPass, scaled, with_cost_of_noting
from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.transfer.clock import HostClock

logger = logging.getLogger(__name__)

# Differences put down to noise, as a share of the step.
_TOLERATED = 0.02
# How far a plan may miss `max_slowdown`, by the number of planned passes compared: the fewer, the more.
_IN_TURN = {1: 0.1, 2: 0.05, 8: 0.0}
_WITH_ONE = {2: 0.01}


class Comparison:
    """Times of passes that follow one plan, and of plain passes: `plain_s` where the two do not take turns.

    Single passes differ by more than a plan may miss its limit, so the fastest of several are compared. Where a plain
    pass costs no memory, as on a CPU, planned and plain passes take turns. Elsewhere there is one plain pass.
    """

    def __init__(self, max_slowdown: float, takes_turns: bool) -> None:
        self.plain_s: float | None = None
        self._max_slowdown, self._takes_turns = max_slowdown, takes_turns
        self._may_miss = _IN_TURN if takes_turns else _WITH_ONE
        self._planned_s: list[float] = []
        self._in_turn_s: list[float] = []

    @property
    def wants_plain(self) -> bool:
        return self._takes_turns and len(self._in_turn_s) < len(self._planned_s)

    def restart(self) -> None:
        self._planned_s.clear()
        self._in_turn_s.clear()

    def add_planned(self, elapsed_s: float) -> float | None:
        """Take the seconds of a planned pass; returns the slowdown, if it has just turned out to be too much."""
        if len(self._planned_s) == max(self._may_miss):
            return None
        self._planned_s.append(elapsed_s)
        return None if self._takes_turns or self.plain_s is None else self._excessive(self.plain_s)

    def add_plain(self, elapsed_s: float) -> float | None:
        self._in_turn_s.append(elapsed_s)
        return self._excessive(min(self._in_turn_s))

    def drop_planned(self) -> None:
        """Forget the last planned pass: the plain one after it was of another size."""
        self._planned_s.pop()

    def _excessive(self, plain_s: float) -> float | None:
        slowdown = min(self._planned_s) / plain_s - 1
        may_miss = self._may_miss.get(len(self._planned_s))
        return slowdown if may_miss is not None and slowdown > self._max_slowdown + may_miss else None


class PassTimes:
    """The times of one model's passes on one device; with `takes_turns` a plain pass follows each planned one."""

    def __init__(self, device: DeviceState, max_slowdown: float, takes_turns: bool) -> None:
        self._device = device
        # On a host's clock copies never run beside compute.
        self._has_own_time = not isinstance(device.clock, HostClock)
        self.comparison = Comparison(max_slowdown, takes_turns)
        # Whether a pass under the plan in force has been timed as a whole, without recording.
        self._is_timed = False
        self._computed_s = 0.0
        self._stalled_ms = 0.0
        # A pass to compare with the plan once the device has reached its end.
        self._watched: OffloadedPass | None = None

    def start_timing(self, this_pass: OffloadedPass) -> None:
        """Begin to time a pass as a whole; the host waits for the device."""
        # Asking for a time waits for its marks. The stalls so far are counted off, for `stop_timing`.
        self._device.clock.elapsed_s(this_pass.begun, this_pass.begun)
        self._newly_stalled_s()

    def stop_timing(self, this_pass: OffloadedPass) -> None:
        """Take the time of the pass up to the end of its last backward; the host waits for the device."""
        self._computed_s = this_pass.elapsed_s() - self._newly_stalled_s()

    def begin_recording(self) -> None:
        self._is_timed = False
        self.comparison.restart()

    def begin_plan(self) -> None:
        self._watched = None
        self.comparison.restart()
        self._newly_stalled_s()

    def compare_plain(self, this_pass: OffloadedPass, recording: RecordedPass) -> float | None:
        """Return the share by which planned passes take longer than a plain one of equal sizes, if too much."""
        if tuple(this_pass.sizes) == recording.sizes[: len(this_pass.sizes)]:
            return self.comparison.add_plain(self._computed_s)
        self.comparison.drop_planned()
        return None

    def take_plain(
        self, recording: RecordedPass, num_operations: Mapping[weakref.ref[nn.Module] | None, int]
    ) -> RecordedPass:
        """Return the recording with the time of a pass that was not recorded, and the time of noting operations."""
        plain_s, recorded_s = self._computed_s, recording.profile.step_s
        self._is_timed = True
        if plain_s <= 0 or recorded_s <= 0:
            return recording
        self.comparison.plain_s = plain_s
        in_proportion, num = self._scaled(recording, plain_s, recorded_s), sum(num_operations.values())
        if in_proportion is None or not num:
            return in_proportion or recording
        return with_cost_of_noting(in_proportion, num_operations, max(0.0, recorded_s - plain_s) / num)

    @property
    def wants_whole(self) -> bool:
        return self._has_own_time and not self._is_timed

    def take_whole(self, recording: RecordedPass, plan: OffloadPlan) -> RecordedPass | None:
        """Return the recording for the time of a planned pass, None where the plan has foreseen it."""
        self._is_timed = True
        expected_s = plan.plain_step_s + plan.recompute_s
        return self._scaled(recording, self._computed_s, expected_s) if self._computed_s > 0 else None

    def next_ended(self, this_pass: OffloadedPass) -> OffloadedPass | None:
        """Return a planned pass whose end the device has reached, this one or one before."""
        self._watched = self._watched or this_pass
        # A host that runs ahead asks again when the next pass begins.
        if not self._device.clock.reached(self._watched.ended):
            return None
        ended, self._watched = self._watched, None
        return ended

    def excess_wait_s(self, ended: OffloadedPass, plan: OffloadPlan) -> float:
        """Return how much longer compute has waited for copies than predicted, 0 where that is within noise."""
        if not self._has_own_time:
            return 0.0
        # The new stalls include those of later passes, if the host is ahead; the time of the pass is its own.
        excess_s = min(self._newly_stalled_s() - plan.stall_s, ended.elapsed_s() - plan.predicted_step_s)
        return excess_s if excess_s > _TOLERATED * plan.predicted_step_s else 0.0

    def _scaled(self, recording: RecordedPass, computed_s: float, expected_s: float) -> RecordedPass | None:
        """Return the recorded times in proportion to a pass not recorded, None where they hardly differ."""
        if abs(computed_s - expected_s) <= _TOLERATED * expected_s:
            return None
        figures = 1e3 * computed_s, 1e3 * expected_s
        logger.info("activation offloading: a pass computes for %.1f ms; recorded, it took %.1f ms", *figures)
        return scaled(recording, computed_s / expected_s)

    def _newly_stalled_s(self) -> float:
        before, self._stalled_ms = self._stalled_ms, self._device.stall_ms()
        return 1e-3 * (self._stalled_ms - before)
