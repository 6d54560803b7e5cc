"""The memory that each offloaded storage goes to: the nearest one as far as its budget goes, the next one after it."""

import math
from collections.abc import Iterator, Sequence

from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.transfer.tier import Tier

# A file holds whole pages, and a tensor begins anywhere in one.
_DISK_SLACK = 2 * 4096
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Memories:
    """Assigns offloaded storages to the tiers below the device.

    With more bytes than the nearest tier may hold, two orders decide which storages go further down: those first whose
    bytes lie longest unused, which leaves a slow tier most time; or some from everywhere in the pass, which lets the
    queues of both tiers work at the same time.
    """

    def __init__(self, profile: Profile, tiers: Sequence[Tier]) -> None:
        self._profile, self._tiers = profile, tiers
        unused_s = [need - s.saved_at_s for s, need in zip(profile.storages, profile.first_needs_s, strict=True)]
        indices = range(len(profile.storages))
        self._orders = [
            sorted(indices, key=lambda index: (-unused_s[index], index)),
            sorted(indices, key=lambda index: index * _GOLDEN_RATIO % 1),
        ]

    def assignments(self, actions: bytes) -> Iterator[bytes]:
        """Yield different assignments, each with the number of a tier for every storage; none without room."""
        offloaded = [index for index, action in enumerate(actions) if action == Action.OFFLOAD]
        num_bytes = sum(self._profile.sizes[index] for index in offloaded)
        if not offloaded or self._has_room(0, num_bytes, len(offloaded)):
            yield bytes(len(actions))
            return
        if len(self._tiers) > 1:
            yield from dict.fromkeys(found for order in self._orders if (found := self._spilled(actions, order)))

    def _spilled(self, actions: bytes, order: Sequence[int]) -> bytes | None:
        """Send storages to the last tier, in an order, until the rest fits the first; None if the last has no room."""
        first, last = self._tiers[0], len(self._tiers) - 1
        offloaded = [index for index in order if actions[index] == Action.OFFLOAD]
        left_bytes = sum(self._profile.sizes[index] for index in offloaded)
        memories, spilled_bytes, num_spilled = bytearray(len(actions)), 0, 0
        for index in offloaded:
            if first.budget_bytes is None or left_bytes <= first.budget_bytes:
                break
            memories[index] = last
            left_bytes -= self._profile.sizes[index]
            spilled_bytes, num_spilled = spilled_bytes + self._profile.sizes[index], num_spilled + 1
        return bytes(memories) if self._has_room(last, spilled_bytes, num_spilled) else None

    def _has_room(self, memory: int, num_bytes: int, num_storages: int) -> bool:
        tier = self._tiers[memory]
        slack = _DISK_SLACK * num_storages if tier.name == "disk" else 0
        return tier.budget_bytes is None or num_bytes + slack <= tier.budget_bytes
