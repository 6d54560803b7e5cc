"""The choice of a teacher's mode: at the start from the arguments, with `auto` again from measurements."""

import logging
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_memopt.memory.device_counters import Counters
from hf_memopt.transfer import Copier
from hf_memopt.transfer.clock import PROBE_BYTES, Clock, bytes_per_s
from hf_memopt.units import GIB, format_gib
from hf_memopt.weights.homes.home import WeightsHome
from hf_memopt.weights.homes.packed_weights import PackedWeights
from hf_memopt.weights.strategies.placement import ResidentWeights, StreamedVisits, SwappedWeights, WeightPlacement

logger = logging.getLogger(__name__)

# The optimizer makes its state in its first step; the second one sees the whole peak.
_OPTIMIZER_STEPS = 2
_PROBES = 4


TeacherMode = Literal["auto", "resident", "swap", "stream"]
TEACHER_MODES: tuple[str, ...] = get_args(TeacherMode)

# Share of the process's memory; the rest is left to fragmentation.
_USABLE = 0.95


class Choice(NamedTuple):
    """A mode, the reason in words, and the expected cost."""

    mode: str
    reason: str
    predicted_device_bytes: int  # the weights' peak
    # Per visit. At most this for swap, without `prefetch()`; at least this for stream, by bandwidth.
    predicted_stall_ms: float


def choose_at_start(
    mode: TeacherMode,
    weights_bytes: int,
    budget_bytes: int | None,
    device_type: str,
    home: str,
    counts_memory: Callable[[], bool],
) -> tuple[TeacherMode, str]:
    """Return the mode to begin with, and the reason in words. `auto` means streaming until steps were measured."""
    if mode != "auto":
        return mode, f"{mode} was asked for"
    if device_type == "cpu" and home == "host":
        return "resident", "it runs on the CPU, where offloading frees nothing"
    if budget_bytes is not None:
        own, budget = format_gib(weights_bytes), f"{budget_bytes / GIB:g} GiB"
        if weights_bytes <= budget_bytes:
            return "resident", f"its {own} fit the budget of {budget}"
        return "stream", f"its {own} exceed {budget}"
    if device_type == "cpu":
        return "stream", "it runs on the CPU, and no budget_gib says that its weights may stay in memory"
    if not counts_memory():
        return "swap", f"torch counts no memory on {device_type}, so there is nothing to choose by"
    return "auto", "it streams until two optimizer steps have been measured"


def usable_bytes(capacity_bytes: int) -> int:
    return int(_USABLE * capacity_bytes)


def choose(
    *,
    capacity_bytes: int,
    outside_bytes: int,
    inside_bytes: int,
    weights_bytes: int,
    stream_bytes: int,
    stream_visit_bytes: int,
    bytes_per_s: float,
    visit_s: float,
) -> Choice:
    """Return the first mode that fits, from the fastest to the smallest. Bytes are device memory.

    Resident, if the weights fit beside the step's peak. Swap, if they fit beside the peak of the teacher's own pass,
    which helps where the student's activations are larger. Otherwise stream.

    Args:
        capacity_bytes: for all tensors of this process.
        outside_bytes: their peak outside of visits, once the optimizer's state existed.
        inside_bytes: their peak during visits, the teacher's weights included.
        weights_bytes: all of the teacher's own weights.
        stream_bytes: held by streaming in a visit.
        stream_visit_bytes: copied by streaming in a visit.
        bytes_per_s: from host to device.
        visit_s: a visit, without waiting for copies.
    """
    usable, peak = usable_bytes(capacity_bytes), max(outside_bytes, inside_bytes)
    own, inside = format_gib(weights_bytes), format_gib(inside_bytes)
    if weights_bytes <= usable - peak:
        return Choice("resident", f"{own} fit beside the step's peak of {format_gib(peak)}", weights_bytes, 0.0)
    if weights_bytes <= usable - inside_bytes:
        reason = f"{own} fit beside the teacher's pass, {inside}, but not the step's peak"
        return Choice("swap", reason, weights_bytes, 1e3 * weights_bytes / bytes_per_s)
    stall_s = max(0.0, stream_visit_bytes / bytes_per_s - visit_s)
    reason = f"{own} do not fit beside the teacher's pass, {inside} of {format_gib(usable)}"
    return Choice("stream", reason, stream_bytes, 1e3 * stall_s)


class AutoWeights(WeightPlacement):
    """Streams everything first, which takes the least memory, and chooses after two measured optimizer steps.

    In those steps the process's peak memory counters are reset at the beginning and end of each visit, and the host
    waits for the device at the end of each.
    """

    def __init__(
        self,
        streamed: StreamedVisits,
        weights: PackedWeights,
        home: WeightsHome,
        copier: Copier,
        stall_ms: Callable[[], float],
        counters: Counters,
        clock: Clock,
    ) -> None:
        self.choice: Choice | None = None
        self._follow(streamed, streamed.reason)
        # Stall in milliseconds, and visits, before the choice.
        self._before = 0.0, 0
        # None after the choice, so that nothing keeps the home of resident weights.
        self._undecided: tuple[StreamedVisits, WeightsHome] | None = (streamed, home)
        self._weights = weights
        self._copier = copier
        self._stall_ms = stall_ms
        self._counters = counters
        self._clock = clock
        self._outside_bytes = self._inside_bytes = 0
        self._visit_s = float("inf")
        self._begun: tuple[Any, float] = (None, 0.0)
        self._num_visits = 0
        # One element a step; the hook keeps this list alone, not this object.
        self._optimizer_steps = steps = list[None]()
        hook = register_optimizer_step_post_hook(lambda *_: steps.append(None))
        self._stop_counting = weakref.finalize(self, hook.remove)

    def device_memory(self) -> tuple[int, int]:
        return self._inner.device_memory()

    def predictions(self) -> dict[str, float | None]:
        if self.choice is None:
            return {}
        stall_ms, num_visits = self._before
        visits = self._num_visits - num_visits
        return {
            "predicted_device_bytes": self.choice.predicted_device_bytes,
            "predicted_stall_ms": self.choice.predicted_stall_ms,
            "stall_ms_per_visit": (self._stall_ms() - stall_ms) / visits if visits else None,
        }

    def prefetch(self) -> None:
        self._inner.prefetch()

    def onload(self) -> None:
        if self._undecided is not None:
            self._outside_bytes = max(self._outside_bytes, self._counters.read().peak_allocated_bytes)
            if len(self._optimizer_steps) >= _OPTIMIZER_STEPS and self._undecided[0].is_known:
                self._settle(*self._undecided)
        if self._undecided is not None:
            self._counters.reset_peaks()
            self._begun = self._clock.mark(), self._stall_ms()
        self._inner.onload()

    def evict(self, finished: bool) -> None:
        if self._undecided is not None:
            self._inside_bytes = max(self._inside_bytes, self._counters.read().peak_allocated_bytes)
            self._counters.reset_peaks()
            if finished and self._num_visits:  # the first visit is watched and slow
                begun, stalled_ms = self._begun
                elapsed_s = self._clock.elapsed_s(begun, self._clock.mark())
                self._visit_s = min(self._visit_s, elapsed_s - 1e-3 * (self._stall_ms() - stalled_ms))
        self._num_visits += 1
        self._inner.evict(finished)

    def _settle(self, streamed: StreamedVisits, home: WeightsHome) -> None:
        free, _ = self._counters.free_and_total()
        capacity_bytes = free + self._counters.read().reserved_bytes
        room = usable_bytes(capacity_bytes) - self._inside_bytes + streamed.device_memory()[1]
        stream_bytes, stream_visit_bytes = streamed.forecast(room)
        self.choice = choose(
            capacity_bytes=capacity_bytes,
            outside_bytes=self._outside_bytes,
            inside_bytes=self._inside_bytes,
            weights_bytes=self._weights.num_bytes,
            stream_bytes=stream_bytes,
            stream_visit_bytes=stream_visit_bytes,
            bytes_per_s=_bandwidth(home, self._copier, self._clock),
            visit_s=self._visit_s,
        )
        if self.choice.mode == "stream":
            streamed.set_budget(room)
            self._follow(streamed, self.choice.reason)
        else:
            streamed.close()
            self._follow(self._moved(self.choice, home), self.choice.reason)
        self._undecided = None
        self._stop_counting()
        self._before = self._stall_ms(), self._num_visits
        logger.info(
            "teacher: %s from now on; %s. Predicted: %.2f GiB on the device, %.1f ms of waiting per visit",
            self.choice.mode,
            self.reason,
            self.choice.predicted_device_bytes / 2**30,
            self.choice.predicted_stall_ms,
        )

    def _follow(self, placement: WeightPlacement, reason: str) -> None:
        self._inner, self.reason = placement, reason
        self.mode, self.host_bytes = placement.mode, placement.host_bytes

    def _moved(self, choice: Choice, home: WeightsHome) -> WeightPlacement:
        if choice.mode == "swap":
            return SwappedWeights(self._weights, home, self._copier, choice.reason)
        block = self._copier.empty_device(home.num_bytes)
        begun = self._clock.mark()
        home.to_device(0, block).wait()
        home.check()
        # Nothing later would find this last copy over, and give the host copy back.
        self._clock.elapsed_s(begun, self._clock.mark())
        return ResidentWeights(self._weights, block, choice.reason)


def _bandwidth(home: WeightsHome, copier: Copier, clock: Clock) -> float:
    destination = copier.empty_device(min(PROBE_BYTES, home.num_bytes))
    speed = bytes_per_s(lambda: home.to_device(0, destination), destination.nbytes, clock, _PROBES)
    copier.release(destination)
    return speed
