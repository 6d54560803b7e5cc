"""The streamed weights of a simulated run: their memory is labelled, their copies are counted and take time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimate.simulation.virtual_disk import VirtualDisk
from hf_memopt.estimate.simulation.virtual_time import VirtualClock, VirtualCopier, VirtualTransfer
from hf_memopt.transfer import Copier
from hf_memopt.transfer.file_reader import PART_BYTES, staging_bytes
from hf_memopt.transfer.storage_memory import ResizedMemory, StorageMemory
from hf_memopt.weights.homes import looked_up
from hf_memopt.weights.packed_weights import OffsetTensor, PackedWeights, WeightSlice

_HOST = torch.device("cpu")


class VirtualBase:
    """Makes the copiers of streamed weights, and counts the bytes that they bring to the device or read in a step.

    `label` is called with device memory that holds streamed weights, at the latest before that is given back.
    """

    def __init__(self, clock: VirtualClock, disk: VirtualDisk, label: Callable[[Tensor], None]) -> None:
        self.clock, self.disk, self.label = clock, disk, label
        self.is_used = False
        self.step_bytes_brought = self.step_bytes_read = 0

    def make_copier(self, device: torch.device) -> "_BaseCopier":
        self.is_used = True
        return _BaseCopier(self, device)

    def begin_step(self) -> None:
        self.step_bytes_brought = self.step_bytes_read = 0


class _BaseCopier(VirtualCopier):
    def __init__(self, base: VirtualBase, device: torch.device) -> None:
        super().__init__(base.clock, device)
        self._base = base

    def to_device(self, source: Tensor, destination: Tensor) -> VirtualTransfer:
        self._base.step_bytes_brought += destination.nbytes
        self._base.label(destination)
        return super().to_device(source, destination)

    def release(self, buffer: Tensor) -> None:
        """Label memory that no copy has filled: the casts of weights."""
        self._base.label(buffer)


class VirtualFileHome:
    """A `WeightsHome` in files that do not exist.

    Reads pass through a ring in host memory part by part, so that a copy ends with the last part after its read.
    """

    bytes_read, waited_s = 0, 0.0

    def __init__(self, base: VirtualBase, weights: PackedWeights, device: torch.device, copier: Copier) -> None:
        self.num_bytes = self.file_bytes = weights.num_bytes
        self._base, self._copier = base, copier
        on_device = device.type != "cpu"
        self._ring = copier.empty_host(staging_bytes(weights.num_bytes) if on_device else 0)
        self.host_bytes = self._ring.nbytes
        self.views = [[_unread(each) for each in piece.offsets] for piece in weights.slices]

    def to_device(self, start: int, destination: Tensor) -> VirtualTransfer:
        self._base.step_bytes_read += destination.nbytes
        read = self._base.disk.reads.copy(destination.nbytes)
        copy = self._copier.to_device(destination, destination)
        assert isinstance(copy, VirtualTransfer)
        last_s = min(PART_BYTES, destination.nbytes) / self._base.clock.card.link_bytes_per_s
        return VirtualTransfer(self._base.clock, max(copy.ended_s, read.ended_s + last_s))

    def memory(self, piece: WeightSlice, device: torch.device, message: str) -> StorageMemory:
        return ResizedMemory(piece.num_bytes, device, message)

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        return looked_up(self.views[slice_number][place], indices.cpu()).to(indices.device)

    def check(self) -> None:
        """Do nothing: there is no file."""

    def settle(self) -> None:
        """Do nothing: no memory is at stake."""

    def trim(self) -> None:
        """Do nothing: dropped memory is the allocator's."""


def _unread(each: OffsetTensor) -> Tensor:
    """Return a tensor like a weight that counts as no memory of the host, as it is mapped from a file."""
    tensor = each.tensor
    assert isinstance(tensor, FakeTensor)
    with _disable_current_modes():
        seen = torch.empty_strided(tensor.size(), each.stride, dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, seen, _HOST)
