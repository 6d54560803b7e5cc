"""Host memory for offloaded tensors: blocks of exact sizes, used again step after step."""

from collections import defaultdict

from torch import Tensor

from hf_memopt.transfer.copier import Copier


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
        self.num_allocations = 0
        self.bytes_held = 0
        self.bytes_live = 0

    def acquire(self, num_bytes: int) -> Tensor | None:
        """A block of exactly `num_bytes`, uint8, or None if the budget has no room for it."""
        blocks = self._free[num_bytes]
        if blocks:
            block = blocks.pop()
        elif self._make_room(num_bytes):
            block = self._copier.empty_host(num_bytes)
            self.num_allocations += 1
            self.bytes_held += num_bytes
        else:
            return None
        self.bytes_live += num_bytes
        return block

    def release(self, block: Tensor) -> None:
        """Take back a block that nothing reads or writes any more."""
        self._copier.release(block)
        self.bytes_live -= block.nbytes
        self._free[block.nbytes].append(block)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop free blocks of other sizes, largest first, until `num_bytes` fit the budget."""
        if self._budget_bytes is None:
            return True
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.bytes_held + num_bytes > self._budget_bytes:
                self.bytes_held -= self._free[size].pop().nbytes
        return self.bytes_held + num_bytes <= self._budget_bytes
