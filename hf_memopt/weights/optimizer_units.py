"""Units of an optimizer's state: a few parameters' tensors as one block, which visits the device for an update.

    away ── fetch() ──► on its way ── arrive() ──► here ── send() ──► on its way home ── settle() ──► away

Tensors with a shape move. Counters without one, numbers, and tensors on another device stay where they are.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.autograd_state import PARAMETER_TYPES, PLAIN_TYPES, unwrapped
from hf_memopt.transfer.copier import Transfer
from hf_memopt.transfer.host_memory import return_freed_memory
from hf_memopt.transfer.lower_memory import Place
from hf_memopt.transfer.storage_memory import StorageMemory, WholePages
from hf_memopt.weights.homes.block_home import BlockHome
from hf_memopt.weights.homes.packed_weights import is_quantised, memory_ranges, packed, rewrapped, views


class Leaf(NamedTuple):
    """A tensor of a parameter's state, and the dictionary or list that has it."""

    container: Any
    key: Any
    tensor: Tensor


def leaves(container: Any) -> Iterator[Leaf]:
    """Yield the tensors in nested dictionaries and lists."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        if isinstance(value, Tensor):
            yield Leaf(container, key, value)
        elif isinstance(value, dict | list):
            yield from leaves(value)


def movable(found: Iterable[Leaf], parameter: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside of a parameter's leaves that move."""
    plain = [each for each in (parameter, parameter.grad) if each is not None and type(each) in _PLAIN_PARAMETERS]
    owned = {each.untyped_storage()._cdata for each in plain}
    for leaf in found:
        for tensor in unwrapped(leaf.tensor) if is_quantised(leaf.tensor) else (leaf.tensor,):
            if (
                type(tensor) in PLAIN_TYPES
                and tensor.dim() > 0
                and tensor.numel() > 0
                and tensor.layout is torch.strided
                and tensor.device == parameter.device
                and tensor.untyped_storage()._cdata not in owned
            ):
                yield tensor


_PLAIN_PARAMETERS = {Tensor, *PARAMETER_TYPES}


class PackedState:
    """All tensors of some parameters' state where they are now, and the layout of those that move in one block."""

    def __init__(self, state: Mapping[Tensor, Any], parameters: Iterable[Tensor]) -> None:
        found = [(each, list(leaves(state.get(each) or {}))) for each in parameters]
        self.leaves = [leaf for _, its in found for leaf in its]
        self._ranges = memory_ranges([tensor for each, its in found for tensor in movable(its, each)])
        slices = packed(self._ranges)
        self.offsets = [each for piece in slices for each in piece.offsets]
        self.num_bytes = sum(piece.num_bytes for piece in slices)
        self._starts = [piece.start for piece in slices]

    def move(self, block: Tensor) -> None:
        """Copy the bytes to `block`, and replace the tensors by views of it."""
        for start, each in zip(self._starts, self._ranges, strict=True):
            memory = each.memory
            block[start : start + memory.nbytes].copy_(memory)
        moved = views(self.offsets, block)
        by_id = {id(old.tensor): new for old, new in zip(self.offsets, moved, strict=True)}
        for container, key, tensor in self.leaves:
            container[key] = rewrapped(tensor, lambda each: by_id.get(id(each), each))

    def is_in(self, block: Tensor) -> bool:
        """Return whether all state lies at its place in `block`."""
        first = block.data_ptr()
        return all(each.begin == first + start for start, each in zip(self._starts, self._ranges, strict=True))


class StateUnit:
    """The state of neighbouring parameters of one group and device, with a place of `num_bytes` reserved at home."""

    def __init__(self, parameters: list[Tensor], home: BlockHome, num_bytes: int) -> None:
        self.parameters, self._home, self._device = parameters, home, parameters[0].device
        self.is_here = False  # or on its way to or from the device
        self.is_newer = False  # than the bytes at home
        self._packed = PackedState({}, ())
        self._memory: StorageMemory | None = None
        self._place: Place | None = None
        self._shown: weakref.ref[Any] | None = None
        self._coming: Transfer | None = None
        self.going: Transfer | None = None  # the write home that is under way
        self._is_starting = False  # one of both
        if num_bytes:
            self._reserve(num_bytes)
            self._take()
            home.trim()

    @property
    def is_new(self) -> bool:
        """Return whether there is no state yet."""
        return not self._packed.leaves

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._place is None else self._place.nbytes

    def check(self) -> None:
        if any(each.device != self._device for each in self.parameters):
            raise RuntimeError(
                f"parameters were moved from {self._device} to {self.parameters[0].device} without their optimizer's "
                "state: load_state_dict() moves it"
            )

    def fetch(self) -> None:
        """Start bringing the bytes."""
        self._settle_interrupted()
        if self._packed.num_bytes and not self.is_here:
            assert self._memory is not None
            assert self._place is not None
            self._is_starting = True
            self._share_with_forks(False)
            self._coming = self._place.memory.read(self._place.block, self._memory.give())
            self.is_here, self._is_starting = True, False

    def arrive(self) -> None:
        """Wait for the bytes, and open the memory to the optimizer."""
        self._settle_interrupted()
        if self._coming is not None:
            assert self._memory is not None
            try:
                self._coming.wait()
            except Exception:  # the copy is over, which it is not after an interrupt
                self._coming = None
                self._take()
                raise
            self._share_with_forks(True)
            self._memory.show()
            self._coming = None

    def pack(self, state: Mapping[Tensor, Any]) -> None:
        """Move state that an update has made, or has replaced, into the block."""
        self.is_newer = self.is_here
        found = PackedState(state, self.parameters)
        if found.num_bytes:
            memory = self._memory
            if memory is None or not (self.is_here and found.is_in(memory.block)):
                if memory is None or not self.is_new or self.num_bytes != found.num_bytes:
                    self._release()
                    memory = self._reserve(found.num_bytes)
                elif not self.is_here:  # its place was reserved before there was any state
                    memory.give()
                    memory.show()
                    self.is_here = True
                found.move(memory.block)
                found = PackedState(state, self.parameters)
                if self._device.type == "cpu":
                    return_freed_memory()
            self.is_newer = True
        self._packed = found

    def send(self) -> None:
        """Start writing the bytes home."""
        self._settle_interrupted()
        if self.is_here and self.going is None:
            assert self._memory is not None
            assert self._place is not None
            self._is_starting = True
            self.going = self._place.memory.write(self._memory.block, self._place.block)
            self._is_starting = False

    def settle(self) -> None:
        """Wait until the bytes are at home, and free the device's memory; they stay where the copy has failed."""
        self.arrive()
        if self.is_newer:
            self.send()
        if self.going is not None:
            try:
                self.going.wait()
            except Exception:
                self.going = None
                raise
            self.going, self.is_newer = None, False
        if self.is_here:
            self._take()

    def at_home(self) -> dict[int, Tensor]:
        """Return, by the id of each tensor that moves, its values where they are now, without a copy."""
        if self._place is None or self._memory is None or not self._packed.num_bytes:
            return {}
        if self.is_here:
            block = self._memory.block
        else:
            shown = self._shown and self._shown()
            if shown is None:
                shown = self._place.memory.at_home(self._place.block)
                self._shown = weakref.ref(shown)
            block = torch.frombuffer(shown, dtype=torch.uint8)[: self.num_bytes]
        found = views(self._packed.offsets, block)
        return {id(old.tensor): new for old, new in zip(self._packed.offsets, found, strict=True)}

    def forget(self) -> None:
        """Give up the block; state in it is lost."""
        self.is_newer = False
        self.settle()
        self._release()
        self._memory = self._place = None
        self._packed = PackedState({}, ())

    def _settle_interrupted(self) -> None:
        """Wait for a copy that an interrupt has cut off as it was started."""
        if self._is_starting:
            self._home.settle()
            if not self.is_here:
                self._coming = None
                self._take()
            self._is_starting = False

    def _reserve(self, num_bytes: int) -> StorageMemory:
        first = self.parameters[0]
        memory, self._place = self._home.block(
            first.device,
            num_bytes,
            f"state of an optimizer, of {len(self.parameters)} parameters from one of shape {tuple(first.shape)} on, "
            "is at home between updates; read it from `state_dict()` of its OffloadedOptimizer",
        )
        self._memory, self.is_here = memory, True
        return memory

    def _release(self) -> None:
        """Give the place back, once nobody has it shown."""
        if self._place is not None:
            shown = self._shown and self._shown()
            if shown is None:
                self._place.release()
            else:
                weakref.finalize(shown, self._place.release).atexit = False
            self._place = self._shown = None

    def _take(self) -> None:
        assert self._memory is not None
        self._share_with_forks(True)
        self._memory.take()
        self.is_here = False

    def _share_with_forks(self, is_wanted: bool) -> None:
        if isinstance(self._memory, WholePages):
            self._memory.share_with_forks(is_wanted)


class Traffic:
    """Units on their way, with `limit_bytes` on the device at a time unless one is larger; counts what was moved."""

    def __init__(self) -> None:
        self._here: list[StateUnit] = []
        self.limit_bytes = self.peak_bytes = self.bytes_read = self.bytes_written = 0

    def has_room(self, unit: StateUnit) -> bool:
        return unit in self._here or self._num_bytes + unit.num_bytes <= self.limit_bytes

    def bring(self, unit: StateUnit) -> None:
        """Start bringing a unit; waits for others to be home where there is no room."""
        if unit.is_new:  # the optimizer makes its state first, which is then moved to the block
            self.settle()
        elif unit.going:  # other parameters lie between two of the unit's
            unit.settle()
        while not self.has_room(unit) and self._here:
            self._settle_first()
        if unit not in self._here:
            self._here.append(unit)
        if not unit.is_here and not unit.is_new:
            unit.fetch()
            self.bytes_read += unit.num_bytes

    def send(self, unit: StateUnit) -> None:
        """Start writing a unit home."""
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        self.bytes_written += unit.num_bytes
        unit.send()

    def settle(self) -> None:
        """Wait until all units are home."""
        while self._here:
            self._settle_first()

    def forget(self, unit: StateUnit) -> None:
        unit.forget()
        self._here = [each for each in self._here if each is not unit]

    @property
    def _num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self._here)

    def _settle_first(self) -> None:
        self._here[0].settle()
        del self._here[0]
