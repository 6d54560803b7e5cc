"""Device memory that blocks of frozen weights pass through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.weights.homes import WeightsHome
from hf_memopt.weights.packed_weights import OffsetTensor, WeightSlice, bind, views
from hf_memopt.weights.streaming.copy_schedule import Block


class _Run(NamedTuple):
    """One copy: its beginnings at the weights' home and in the slot, and its length, in bytes."""

    source: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class _Layout:
    """The places of a block's weights in its slot and at their home.

    Attributes:
        num_bytes: of the block.
        offsets: its tensors and their offsets in the slot.
        in_place: the same tensors' views while the block is not on the device.
        runs: each copy; neighbours travel in one.
    """

    num_bytes: int
    offsets: tuple[OffsetTensor, ...]
    in_place: tuple[Tensor, ...]
    runs: tuple[_Run, ...]


@dataclass
class _Slot:
    memory: Tensor
    to_copy: list[_Run]
    on_their_way: list[tuple[_Run, Transfer]] = field(default_factory=list)
    bound: bool = False


class Ring:
    """Brings blocks to the device, binds the module's tensors to them, and drops them. Nothing is copied back.

    Slots of `slot_bytes`, for blocks that do not stay, are taken and given back together, so that the allocator hands
    the same memory out again. A slot that is still read through a view stays its reader's: it is memory of its own, so
    the next block gets another. Every method can be called again after an exception, and then finishes its work.
    """

    def __init__(
        self,
        copier: Copier,
        home: WeightsHome,
        slices: Sequence[WeightSlice],
        in_place: Sequence[Sequence[Tensor]],
        blocks: Sequence[Block],
        slot_bytes: int,
    ) -> None:
        self._copier = copier
        self._home = home
        self._blocks = blocks
        self._layouts = [_layout([(slices[i], in_place[i]) for i in block.slices]) for block in blocks]
        self._slot_bytes = slot_bytes
        self._slots: dict[int, _Slot] = {}
        self.device_bytes = 0
        self.peak_device_bytes = 0

    @property
    def present(self) -> list[int]:
        """Blocks on the device or on their way, in the order of fetching."""
        return list(self._slots)

    def is_bound(self, number: int) -> bool:
        return number in self._slots and self._slots[number].bound

    def fetch(self, number: int) -> None:
        layout = self._layouts[number]
        if number not in self._slots:
            size = layout.num_bytes if self._blocks[number].stays else max(self._slot_bytes, layout.num_bytes)
            self._slots[number] = _Slot(self._copier.empty_device(size), list(layout.runs))
            self.device_bytes += size
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        slot = self._slots[number]
        while slot.to_copy:
            run = slot.to_copy[0]
            destination = slot.memory[run.start : run.start + run.num_bytes]
            slot.on_their_way.append((run, self._home.to_device(run.source, destination)))
            slot.to_copy.pop(0)

    def bind(self, number: int) -> None:
        """Have the compute stream wait for a fetched block, and point the module's tensors at it."""
        slot, layout = self._slots[number], self._layouts[number]
        if not slot.bound:
            _wait(slot)
            bind(layout.offsets, views(layout.offsets, slot.memory))
            slot.bound = True

    def unbind(self, number: int) -> None:
        slot, layout = self._slots[number], self._layouts[number]
        if slot.bound:
            bind(layout.offsets, layout.in_place)
            slot.bound = False

    def evict(self, number: int) -> None:
        """Unbind a block and give its slot up. Work submitted so far may still read it."""
        self.unbind(number)
        slot = self._slots[number]
        # After an exception or a wrong guess a copy may be under way, and its memory must not be reused yet.
        _wait(slot)
        self._copier.release(slot.memory)
        self.device_bytes -= slot.memory.nbytes
        del self._slots[number]


def _wait(slot: _Slot) -> None:
    while slot.on_their_way:
        run, transfer = slot.on_their_way.pop(0)
        try:
            transfer.wait()
        except BaseException:
            slot.to_copy.append(run)  # the copy is over, and has to be made again
            raise


def _layout(block: Sequence[tuple[WeightSlice, Sequence[Tensor]]]) -> _Layout:
    offsets: list[OffsetTensor] = []
    in_place: list[Tensor] = []
    runs: list[_Run] = []
    filled = 0
    for piece, views_in_place in block:
        offsets += [each._replace(start=filled + each.start - piece.start) for each in piece.offsets]
        in_place += views_in_place
        if runs and runs[-1].source + runs[-1].num_bytes == piece.start:
            runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + piece.num_bytes)
        else:
            runs.append(_Run(piece.start, filled, piece.num_bytes))
        filled += piece.num_bytes
    return _Layout(filled, tuple(offsets), tuple(in_place), tuple(runs))
