"""Plans drawn by lot, whatever they cost: no plan's decision may show in a gradient."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_memopt.activations.planner.candidates import Candidate, CopyWindow, Trials
from hf_memopt.activations.planner.offload_plan import OffloadPlan, _plan
from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage
from hf_memopt.activations.planner.simulator import simulate
from hf_memopt.transfer.tier import Tier


@dataclass
class RandomPlanner:
    """A planner that keeps, offloads or recomputes each storage at random, in windows as random."""

    random: random.Random
    num_plans: int = 0
    num_recomputed: int = 0

    def __call__(self, profile: Profile, tiers: Sequence[Tier], **limits: object) -> OffloadPlan:
        actions = [self._action(storage) for storage in profile.storages]
        windows = {name: self.random.choice([0, 2**14, 2**20]) for name in ("in_flight_bytes", "prefetch_bytes")}
        memories = [self.random.randrange(len(tiers)) for _ in actions]
        timeline = simulate(profile, actions, tiers, memories=memories, **windows)
        self.num_plans += 1
        self.num_recomputed += actions.count(Action.RECOMPUTE)
        return OffloadPlan(
            actions=tuple(actions),
            memories=tuple(memories),
            **windows,
            reload_order=timeline.reload_order,
            predicted_peak_bytes=timeline.peak_bytes,
            predicted_step_s=timeline.step_s,
            plain_step_s=profile.step_s,
            stall_s=timeline.stall_s,
            recompute_s=timeline.recompute_s,
            kept_bytes=0,  # for the log line alone, like the last two
            offloaded_bytes=timeline.offloaded_bytes,
            recomputed_bytes=0,
            disk_bytes=0,
        )

    def _action(self, storage: SavedStorage) -> Action:
        return self.random.choice(list(Action) if storage.recompute_s is not None else [Action.KEEP, Action.OFFLOAD])


def plan_at_random(seed: int, in_flight: int = 2, ahead: int = 2) -> Any:
    def planner(profile: Profile, tiers: Sequence[Tier], **limits: Any) -> OffloadPlan:
        lots = random.Random(seed)
        choices = [
            [Action.KEEP, Action.OFFLOAD] + 2 * [Action.RECOMPUTE] * (storage.recompute_s is not None)
            for storage in profile.storages
        ]
        actions = tuple(lots.choice(choice) for choice in choices)
        largest = max(profile.sizes)
        windows = {"in_flight_bytes": in_flight * largest, "prefetch_bytes": ahead * largest}
        memories = bytes(lots.randrange(len(tiers)) for _ in actions)
        timeline = simulate(profile, actions, tiers, memories=memories, **windows)
        candidate = Candidate(bytes(actions), memories, CopyWindow(0, 0), *windows.values(), timeline, None)
        return _plan(Trials(profile, tiers, ahead, num_left=0), candidate)

    return planner
