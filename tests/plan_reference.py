"""All plans of a small profile."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_memopt.activations.planner.candidates import window_bytes, windows
from hf_memopt.activations.planner.profile import Action, Profile, count_needs
from hf_memopt.activations.planner.simulator import simulate
from hf_memopt.transfer.tier import Tier

# Each storage in a file takes whole pages, from anywhere in the first one to anywhere in the last.
TWO_PAGES = 2 * 4096


@dataclass(frozen=True)
class Cost:
    peak_bytes: int
    step_s: float
    offloaded_bytes: int


def all_plans(profile: Profile, tiers: Sequence[Tier], prefetch_ahead: int) -> list[Cost]:
    """Combine every action and memory for every storage with every window that the planner tries."""
    choices = [(0, 1) if storage.recompute_s is None else (0, 1, 2) for storage in profile.storages]
    costs = []
    for actions in itertools.product(*choices):
        needs = count_needs(profile, actions)
        offloaded = [index for index, action in enumerate(actions) if action == Action.OFFLOAD and needs[index]]
        sizes = [profile.sizes[index] for index in offloaded]
        possible = {window_bytes(window, sizes) for window in windows(prefetch_ahead)}
        for memories, (in_flight, prefetch) in itertools.product(_assignments(profile, tiers, offloaded), possible):
            result = simulate(
                profile, actions, tiers, in_flight_bytes=in_flight, prefetch_bytes=prefetch, memories=memories
            )
            costs.append(Cost(result.peak_bytes, result.step_s, sum(sizes)))
    return costs


def _assignments(profile: Profile, tiers: Sequence[Tier], offloaded: list[int]) -> Iterator[bytes]:
    """Yield every choice of memories within the budgets that leaves to the disk only bytes the host has no room for."""
    for chosen in itertools.product(range(len(tiers)), repeat=len(offloaded)):
        memories = bytearray(len(profile.storages))
        for index, memory in zip(offloaded, chosen, strict=True):
            memories[index] = memory
        if fits(profile, tiers, offloaded, memories) and not _leaves_room(profile, tiers, offloaded, memories):
            yield bytes(memories)


def _leaves_room(profile: Profile, tiers: Sequence[Tier], offloaded: Sequence[int], memories: Sequence[int]) -> bool:
    """Return whether one of the storages further down could be in the nearest memory."""
    further = [index for index in offloaded if memories[index]]
    nearest = [index for index in offloaded if not memories[index]]
    return any(fits(profile, tiers[:1], [*nearest, index], [0] * len(memories)) for index in further)


def fits(profile: Profile, tiers: Sequence[Tier], offloaded: Sequence[int], memories: Sequence[int]) -> bool:
    """Return whether the offloaded storages fit the budgets of their memories."""
    held = [0] * len(tiers)
    for index in offloaded:
        memory = memories[index]
        held[memory] += profile.sizes[index] + (TWO_PAGES if tiers[memory].name == "disk" else 0)
    budgets = [tier.budget_bytes for tier in tiers]
    return all(budget is None or num_bytes <= budget for num_bytes, budget in zip(held, budgets, strict=True))


def front(costs: list[Cost]) -> list[Cost]:
    """Return the fastest plans for the bytes that they hold, smallest first."""
    fastest: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (cost.peak_bytes, cost.step_s)):
        if not fastest or cost.step_s < fastest[-1].step_s:
            fastest.append(cost)
    return fastest
