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

    With more bytes than the nearest tier may hold, two orders decide which storages fill it, each that still fits: the
    largest first, which leaves least of it unused; or some from everywhere in the pass, which lets the queues of both
    tiers work at the same time. The others go further down.
    """

    def __init__(self, profile: Profile, tiers: Sequence[Tier]) -> None:
        self._sizes, self._tiers = profile.sizes, tiers
        indices = range(len(profile.storages))
        self._orders = [
            sorted(indices, key=lambda index: (-profile.sizes[index], index)),
            sorted(indices, key=spread, reverse=True),
        ]

    def assignments(self, actions: bytes) -> Iterator[bytes]:
        """Yield different assignments, each with the number of a tier for every storage; none without room."""
        sizes = [size for size, action in zip(self._sizes, actions, strict=True) if action == Action.OFFLOAD]
        if not sizes or self._has_room(0, sizes):
            yield bytes(len(actions))
        elif len(self._tiers) > 1:
            yield from dict.fromkeys(found for order in self._orders if (found := self._filled(actions, order)))

    def _filled(self, actions: bytes, order: Sequence[int]) -> bytes | None:
        """Fill the first tier in an order, and send the rest to the last; None if that has no room for it."""
        last, room = len(self._tiers) - 1, self._tiers[0].budget_bytes
        assert room is not None
        memories, sent = bytearray(len(actions)), []
        for index in order:
            size = self._sizes[index]
            if actions[index] != Action.OFFLOAD:
                continue
            if size <= room:
                room -= size
            else:
                memories[index] = last
                sent.append(size)
        return bytes(memories) if self._has_room(last, sent) else None

    def _has_room(self, memory: int, sizes: list[int]) -> bool:
        tier = self._tiers[memory]
        slack = _DISK_SLACK * len(sizes) if tier.name == "disk" else 0
        return tier.budget_bytes is None or sum(sizes) + slack <= tier.budget_bytes


def spread(index: int) -> float:
    """Return a tie break that spreads any first part of a sequence evenly over it, as a link needs for equal layers."""
    return index * _GOLDEN_RATIO % 1
