"""Host memory for offloaded tensors: blocks of exact sizes, used again step after step."""

import logging
import time
from collections import defaultdict

from torch import Tensor

from hf_memopt.transfer.copier import Copier

logger = logging.getLogger(__name__)


class HostArena:
    """Hands out host blocks and takes them back. A training step that repeats finds every block it needs.

    Args:
        copier: allocates the blocks, pinned where it can.
        budget_bytes: the arena never holds more than this; None, no limit.
    """

    def __init__(self, copier: Copier, budget_bytes: int | None = None) -> None:
        self._copier = copier
        self._budget_bytes = budget_bytes
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        # Of each size, how many blocks have been free at every moment since the last `trim`.
        self._always_free: dict[int, int] = {}
        self._new_bytes = 0
        self._new_s = 0.0
        self.num_allocations = 0
        self.bytes_held = 0
        self.bytes_live = 0

    def acquire(self, num_bytes: int) -> Tensor | None:
        """A block of exactly `num_bytes`, uint8, or None if the budget has no room for it."""
        blocks = self._free[num_bytes]
        if blocks:
            block = blocks.pop()
            if len(blocks) < self._always_free.get(num_bytes, 0):
                self._always_free[num_bytes] = len(blocks)
        elif self._make_room(num_bytes):
            block = self._allocate(num_bytes)
        else:
            return None
        self.bytes_live += num_bytes
        return block

    def release(self, block: Tensor) -> None:
        """Take back a block that nothing reads or writes any more."""
        num_bytes = block.nbytes
        self._copier.release(block)
        self.bytes_live -= num_bytes
        self._free[num_bytes].append(block)

    def log_growth(self) -> None:
        """Say in the log how much has been taken since the last call, and how long that has held up the host."""
        if self._new_bytes:
            logger.info(
                "activation offloading: took %.2f GiB of host memory in %.1f s; later passes use it again",
                self._new_bytes / 2**30,
                self._new_s,
            )
            self._new_bytes, self._new_s = 0, 0.0

    def trim(self) -> None:
        """Give up the free blocks that nobody has needed since the last call; none the first time."""
        before = self.bytes_held
        for size, num_blocks in self._always_free.items():
            del self._free[size][:num_blocks]
            self.bytes_held -= num_blocks * size
        self._always_free = {size: len(blocks) for size, blocks in self._free.items()}
        if self.bytes_held < before:
            logger.info(
                "activation offloading: gave %.2f GiB of host memory back, which nothing has used since it was planned",
                (before - self.bytes_held) / 2**30,
            )

    def _allocate(self, num_bytes: int) -> Tensor:
        begun = time.perf_counter()
        block = self._copier.empty_host(num_bytes)
        self._new_s += time.perf_counter() - begun
        self._new_bytes += num_bytes
        self.num_allocations += 1
        self.bytes_held += num_bytes
        return block

    def _make_room(self, num_bytes: int) -> bool:
        """Drop free blocks of other sizes, largest first, until `num_bytes` fit the budget."""
        if self._budget_bytes is None:
            return True
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.bytes_held + num_bytes > self._budget_bytes:
                self.bytes_held -= self._free[size].pop().nbytes
                self._always_free[size] = min(self._always_free.get(size, 0), len(self._free[size]))
        return self.bytes_held + num_bytes <= self._budget_bytes
