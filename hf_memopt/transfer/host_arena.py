"""Host memory for offloaded tensors: blocks that are used again step after step."""

import logging
import time

from torch import Tensor

from hf_memopt.transfer.copier import Copier

logger = logging.getLogger(__name__)

# How much larger a block may be than what is put into it.
_LARGER = 2


class HostArena:
    """Hands out host blocks and takes them back. A training step that repeats finds every block it needs.

    Steps of other sizes use the same blocks where these are large enough but not far too large; a block that is not
    quite large enough gives way to a new one. So what is held does not grow with the number of sizes.

    Args:
        copier: allocates the blocks, pinned where it can.
        budget_bytes: the arena never holds more than this; None, no limit.
    """

    def __init__(self, copier: Copier, budget_bytes: int | None = None) -> None:
        self._copier = copier
        self._budget_bytes = budget_bytes
        self._free: dict[int, list[Tensor]] = {}
        # Of each size, how many blocks have been free at every moment since the last `trim`.
        self._always_free: dict[int, int] = {}
        self._new_bytes = 0
        self._new_s = 0.0
        self.num_allocations = 0
        self.bytes_held = 0
        self.bytes_live = 0

    def acquire(self, num_bytes: int) -> Tensor | None:
        """A block of at least `num_bytes`, uint8, or None if the budget has no room for it."""
        if num_bytes in self._free:
            block = self._take(num_bytes)
        elif sizes := self._free_sizes(num_bytes, _LARGER * num_bytes):
            block = self._take(min(sizes))
        elif self._make_room(num_bytes):
            block = self._allocate(num_bytes)
        else:
            return None
        self.bytes_live += block.nbytes
        return block

    def release(self, block: Tensor) -> None:
        """Take back a block that nothing reads or writes any more."""
        num_bytes = block.nbytes
        self._copier.release(block)
        self.bytes_live -= num_bytes
        blocks = self._free.get(num_bytes)
        if blocks is None:
            self._free[num_bytes] = [block]
        else:
            blocks.append(block)

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
        for size, num_blocks in list(self._always_free.items()):
            for _ in range(num_blocks):
                self._drop(size)
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

    def _free_sizes(self, least: int, most: int) -> list[int]:
        return [size for size in self._free if least <= size <= most]

    def _take(self, size: int) -> Tensor:
        blocks = self._free[size]
        block = blocks.pop()
        if len(blocks) < self._always_free.get(size, 0):
            self._always_free[size] = len(blocks)
        if not blocks:
            del self._free[size]
        return block

    def _drop(self, size: int) -> None:
        self.bytes_held -= self._take(size).nbytes

    def _make_room(self, num_bytes: int) -> bool:
        """Drop the free block that is nearly large enough, and others, largest first, until the budget has room."""
        if sizes := self._free_sizes(-(-num_bytes // _LARGER), num_bytes):
            self._drop(max(sizes))
        if self._budget_bytes is None:
            return True
        while self._free and self.bytes_held + num_bytes > self._budget_bytes:
            self._drop(max(self._free))
        return self.bytes_held + num_bytes <= self._budget_bytes
