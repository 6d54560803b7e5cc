"""Plans for the memory that passes may hold: a budget, or the room that the device has left."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, OffloadPlan, make_plan
from hf_memopt.activations.planner.profile import Profile
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.memory.device_counters import Counters, counters_for
from hf_memopt.memory.memory_limit import LimitedMemory, limited_memory
from hf_memopt.memory.ranks import rank_among_several
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.tier import Tier
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)

_SLOWER = 0.8
# Share that a plan may hold of the one with which the device ran out of memory, or nearly did.
_SMALLER = 0.7


# Share of the process's memory that a plan may use; fragmentation and slightly larger steps take the rest.
USABLE = 0.95


class DeviceRoom:
    """The memory that a device has left for saved activations.

    While a pass is recorded, the process's peak memory counters are reset whenever a tensor is saved or used: the peak
    of each stretch, less the bytes of saved activations, is the need of everything else.
    """

    def __init__(self, counters: Counters, device: torch.device) -> None:
        self._counters, self._device = counters, device
        self._begun_bytes = self._lasting_bytes = self._other_bytes = self._peak_bytes = 0
        self._num_retries = self._num_ooms = 0
        # Whether saved activations may take all of it, because somebody has set its limit.
        self.is_to_be_filled = isinstance(counters, LimitedMemory)

    def begin(self) -> None:
        self._begun_bytes = self._other_bytes = self._counters.read().allocated_bytes
        self._counters.reset_peaks()

    def sample(self, saved_bytes: int) -> None:
        self._other_bytes = max(self._other_bytes, self._counters.read().peak_allocated_bytes - saved_bytes)

    def end(self, saved_bytes: int) -> None:
        """Note that backward is over: memory allocated now, gradients included, does not depend on the batch."""
        self.sample(saved_bytes)
        self._lasting_bytes = max(self._begun_bytes, self._counters.read().allocated_bytes - saved_bytes)

    def restart(self) -> None:
        self._counters.reset_peaks()

    def limit_bytes(self) -> int:
        """Return the bytes that saved activations may hold in the next pass: `USABLE` of the memory that the process
        has or could have (this rank's part of the free memory), less the recorded need of everything else and memory
        allocated for good since, such as optimizer states.
        """
        memory = self._counters.read()
        free_bytes, total_bytes = self._counters.free_and_total()
        if self._device.type == "cuda":
            total_bytes = int(torch.cuda.get_per_process_memory_fraction(self._device) * total_bytes)
        ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
        ranks_per_device = max(1, -(-ranks // max(1, devices)))
        capacity = min(memory.reserved_bytes + free_bytes // ranks_per_device, total_bytes)
        return int(USABLE * capacity) - self._other_bytes - (memory.allocated_bytes - self._begun_bytes)

    def grow(self, ratio: float) -> None:
        """Note that passes, and the other memory that they need, are `ratio` times the recorded one."""
        self._other_bytes += int((ratio - 1) * max(0, self._other_bytes - self._lasting_bytes))

    def look_back(self, saved_peak_bytes: int) -> None:
        """Learn from a pass: if more was allocated than ever before, everything else needs more than was recorded."""
        peak_bytes = self._counters.read().peak_allocated_bytes
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self._other_bytes = max(self._other_bytes, peak_bytes - saved_peak_bytes)

    def watch(self) -> None:
        memory = self._counters.read()
        self._num_retries, self._num_ooms = memory.num_alloc_retries, memory.num_ooms

    def ran_short(self) -> bool:
        """Return whether the allocator has returned its cache to the device since `watch`: nothing was left."""
        return self._counters.read().num_alloc_retries > self._num_retries

    def ran_out(self) -> bool:
        return self._counters.read().num_ooms > self._num_ooms


def room_on(device: torch.device) -> DeviceRoom | None:
    counters: Counters | None = limited_memory(device)
    if counters is None and backend_of(device).is_unlimited:
        return None
    counters = counters or counters_for(device)
    return None if counters is None else DeviceRoom(counters, device)


@dataclass(frozen=True)
class OffloadLimits:
    """The limits of a plan; see `ActivationOffloader`."""

    budget_bytes: int | None
    max_slowdown: float
    prefetch_ahead: int


class PlanMaker:
    """Makes the plans of one model's passes on one device; `limit_bytes` is the limit of the plan in force."""

    def __init__(self, device: DeviceState, limits: OffloadLimits, room: DeviceRoom | None) -> None:
        self.limit_bytes: int | None = None
        self._device, self._limits, self._room = device, limits, room
        # The memories below the device, once they have been measured.
        self._tiers: tuple[Tier, ...] = ()
        # A limit that the device has been seen not to grant.
        self._out_of_reach_bytes: int | None = None
        # Bytes that passes planned for the limit have held beyond it.
        self._overlap_bytes = 0

    @property
    def has_budget(self) -> bool:
        return self._limits.budget_bytes is not None

    def make(self, profile: Profile, before: OffloadPlan | None) -> OffloadPlan | None:
        """Return the next plan, None without room; an InfeasibleBudgetError where the first cannot meet the budget."""
        if not self._tiers:
            self._tiers = tuple(memory.tier(self._device.clock) for memory in self._device.lower)
        self.limit_bytes = self._find_limit()
        make = partial(
            make_plan,
            profile,
            self._tiers,
            max_slowdown=self._limits.max_slowdown,
            prefetch_ahead=self._limits.prefetch_ahead,
        )
        plan = self._make_for_budget(make, before) if self.has_budget else self._make_for_device(make)
        if plan is not None:
            logger.info("activation offloading: %s", plan.summary())
        return plan

    def has_less_room_than(self, plan: OffloadPlan) -> bool:
        """Return whether a plan holds more than the device has left: optimizer states came, or other processes."""
        if self._room is None or self.has_budget:
            return False
        return plan.predicted_peak_bytes > self._room.limit_bytes()

    def note_shortage(self, plan: OffloadPlan) -> None:
        """Make later plans hold less: the device ran out of memory under this one, or nearly did."""
        self._out_of_reach_bytes = int(_SMALLER * plan.predicted_peak_bytes)
        logger.warning(
            "activation offloading: the device ran out of memory, or nearly did, with %s of saved activations on it; "
            "from now on they may hold at most %s",
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(self._out_of_reach_bytes),
        )

    def note_overlap(self, peak_bytes: int) -> bool:
        """Return whether the peak of a pass was over budget: passes overlap, which no plan foresees."""
        assert self._limits.budget_bytes is not None
        excess_bytes = peak_bytes - self._limits.budget_bytes
        if excess_bytes <= 0:
            return False
        self._overlap_bytes += excess_bytes
        logger.warning(
            "activation offloading: saved activations held %s more than budget_gib allows, because passes overlap; "
            "their plans leave room for that from now on",
            format_bytes(excess_bytes),
        )
        return True

    def note_slow_copies(self) -> None:
        """Note that copies take longer than measured, beside the model's compute."""
        self._tiers = tuple(tier.slower(_SLOWER) for tier in self._tiers)

    def _find_limit(self) -> int | None:
        limit_bytes = self._limits.budget_bytes
        if limit_bytes is None and self._room is not None:
            limit_bytes = max(0, self._room.limit_bytes())
        limits = [limit for limit in (limit_bytes, self._out_of_reach_bytes) if limit is not None]
        return max(0, min(limits) - self._overlap_bytes) if limits else None

    def _make_for_budget(self, make: Callable[..., OffloadPlan], before: OffloadPlan | None) -> OffloadPlan:
        try:
            return make(budget_bytes=self.limit_bytes, before=before)
        except InfeasibleBudgetError as error:
            if before is None or self._overlap_bytes:
                needed_bytes = error.smallest_bytes + self._overlap_bytes
                budget_bytes = error.budget_bytes + self._overlap_bytes
                raise InfeasibleBudgetError(budget_bytes, needed_bytes, rank=rank_among_several()) from None
            logger.warning("%s; going on with the smallest", str(error))
            return make(budget_bytes=error.smallest_bytes)

    def _make_for_device(self, make: Callable[..., OffloadPlan]) -> OffloadPlan | None:
        """Return the plan that the accepted slowdown allows if it fits, else the fastest that does, else None."""
        try:
            if self._room is not None and self._room.is_to_be_filled:
                return make(budget_bytes=self.limit_bytes)
            return make(budget_bytes=None, device_limit_bytes=self.limit_bytes)
        except InfeasibleBudgetError as error:
            logger.info("activation offloading: %s; until then everything is offloaded", str(error))
            return None
