"""The elements of a storage that its saved views have shown.

Only these are sure to stay as they are: an ODE solver that keeps its stages in one storage writes the next one through
`.data`, which no version counter counts, after the stages before were saved. So a copy serves a later view only for
elements that a view before it has shown.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Elements(NamedTuple):
    """The bytes that a strided view covers, the same for all views of the same elements.

    `runs` are `(count, stride in bytes)` from the outermost to the innermost, `((num_bytes, 1),)` without a gap.
    """

    first: int
    runs: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        """Return the byte behind the last one."""
        return self.first + sum((count - 1) * stride for count, stride in self.runs) + 1

    def include(self, other: "Elements") -> bool:
        """Return whether all elements of another view are among these. False may also mean that it is hard to tell."""
        if self == other:
            return True
        return len(self.runs) == 1 and self.runs[0][1] == 1 and self.first <= other.first and other.last <= self.last


def elements(offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> Elements:
    """Return the elements of a view; offset and strides are counted in elements of `itemsize` bytes."""
    if 0 in size:
        return Elements(offset * itemsize, ((0, 1),))
    runs = [(itemsize, 1)]
    for step, count in sorted((step * itemsize, count) for step, count in zip(stride, size, strict=True) if count > 1):
        before, inner = runs[-1]
        if step == before * inner:  # it goes on where the inner run ends
            runs[-1] = (before * count, inner)
        elif step:
            runs.append((count, step))
    return Elements(offset * itemsize, tuple(runs[::-1]))


def elements_of(tensor: Tensor) -> Elements:
    return elements(int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.itemsize)


def is_whole(tensor: Tensor, num_bytes: int) -> bool:
    if tensor.nbytes != num_bytes:
        return False
    return tensor.is_contiguous() or elements_of(tensor) == Elements(0, ((num_bytes, 1),))


class ShownElements:
    """The elements of one storage that its saved views have shown so far; with `first=None` everything."""

    __slots__ = ("_num_bytes", "_parts")

    def __init__(self, num_bytes: int, first: Elements | None) -> None:
        self._num_bytes = num_bytes
        # None once there is nothing left to show.
        self._parts = None if first is None else [first]

    @classmethod
    def of(cls, tensor: Tensor, num_bytes: int) -> "ShownElements":
        return _EVERYTHING if is_whole(tensor, num_bytes) else cls(num_bytes, elements_of(tensor))

    def add(self, tensor: Tensor) -> None:
        if self._parts is None:
            return
        self._parts.append(elements_of(tensor))
        if is_whole(tensor, self._num_bytes):
            self._parts = None

    def extent(self, num_bytes: int) -> tuple[int, int]:
        """Return the first shown byte and the number of bytes from there to the last."""
        if self._parts is None:
            return 0, num_bytes
        first = min(part.first for part in self._parts)
        return first, max(part.last for part in self._parts) - first

    def include_all_of(self, tensor: Tensor) -> bool:
        return self._parts is None or self.include(elements_of(tensor))

    def include(self, part: Elements) -> bool:
        return self._parts is None or any(shown.include(part) for shown in self._parts)


_EVERYTHING = ShownElements(0, None)
