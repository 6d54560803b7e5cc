"""All plans of a small profile."""

import itertools
import math
from dataclasses import dataclass

from hf_memopt.activations.planner.candidates import window_bytes, windows
from hf_memopt.activations.planner.profile import Action, Link, Profile, count_needs
from hf_memopt.activations.planner.simulator import simulate


@dataclass(frozen=True)
class Cost:
    peak_bytes: int
    step_s: float
    offloaded_bytes: int


def all_plans(profile: Profile, link: Link, prefetch_ahead: int, host_bytes: float = math.inf) -> list[Cost]:
    """Combine every action for every storage with every window that the planner tries."""
    choices = [(0, 1) if storage.recompute_s is None else (0, 1, 2) for storage in profile.storages]
    costs = []
    for actions in itertools.product(*choices):
        needs = count_needs(profile, actions)
        offloaded = [s for s, a, n in zip(profile.sizes, actions, needs, strict=True) if a == Action.OFFLOAD and n]
        if sum(offloaded) > host_bytes:
            continue
        for in_flight, prefetch in {window_bytes(window, offloaded) for window in windows(prefetch_ahead)}:
            result = simulate(profile, actions, link, in_flight_bytes=in_flight, prefetch_bytes=prefetch)
            costs.append(Cost(result.peak_bytes, result.step_s, sum(offloaded)))
    return costs


def front(costs: list[Cost]) -> list[Cost]:
    """Return the fastest plans for the bytes that they hold, smallest first."""
    fastest: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (cost.peak_bytes, cost.step_s)):
        if not fastest or cost.step_s < fastest[-1].step_s:
            fastest.append(cost)
    return fastest
