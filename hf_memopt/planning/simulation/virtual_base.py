"""The streamed weights of a simulated run: their memory is labelled, their copies are counted and take time."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.planning.accounting.allocation_log import OPTIMIZER
from hf_memopt.planning.accounting.categories import GRADIENT, STREAMED, TEACHER, StepLabels, StreamedEstimate
from hf_memopt.planning.simulation.virtual_disk import VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualCopier, VirtualTransfer
from hf_memopt.transfer import Copier, Transfer
from hf_memopt.transfer.file_reader import PART_BYTES, staging_bytes
from hf_memopt.weights.homes.block_home import BlockHome
from hf_memopt.weights.homes.home import HomeInFiles, looked_up
from hf_memopt.weights.homes.packed_weights import OffsetTensor, PackedWeights

_HOST = torch.device("cpu")


class VirtualBase:
    """Makes copiers, and counts the bytes that those of streamed weights and of optimizers' state move in a step.

    Device memory that they take is labelled, at the latest before it is given back.
    """

    def __init__(self, disk: VirtualDisk, labels: StepLabels) -> None:
        self.clock, self.disk, self.labels = disk.clock, disk, labels
        self.is_used = False
        self._moved: Counter[str] = Counter()

    def make_copier(self, device: torch.device, pin_memory: bool, purpose: str) -> VirtualCopier:
        match purpose:
            case "base":
                self.is_used = True
                return _BaseCopier(self, device, lambda block: self.label(block, GRADIENT))
            case "optimizer":
                return _CountingCopier(self, device)
            case "teacher":
                return VirtualCopier(self.clock, device, lambda block: self.label(block, TEACHER))
        return VirtualCopier(self.clock, device)

    def label(self, memory: Tensor, kind: str) -> None:
        self.labels.add([memory], kind)

    def begin_step(self) -> None:
        self._moved = Counter()

    def count(self, name: str, num_bytes: int) -> None:
        """Add bytes to an attribute of `StreamedEstimate`, and to the one for updates during these."""
        self._moved[name] += num_bytes
        if self.disk.phases.name == OPTIMIZER:
            self._moved[f"update_{name}"] += num_bytes

    def estimate(self, peak_bytes: int) -> StreamedEstimate:
        """Return the figures of the newest step."""
        return StreamedEstimate(peak_bytes, **self._moved)


class _CountingCopier(VirtualCopier):
    def __init__(
        self, base: VirtualBase, device: torch.device, on_block: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(base.clock, device, on_block)
        self._base = base

    def to_device(self, source: Tensor, destination: Tensor) -> VirtualTransfer:
        self._base.count("bytes_to_device", destination.nbytes)
        return super().to_device(source, destination)

    def to_host(self, source: Tensor, destination: Tensor) -> VirtualTransfer:
        self._base.count("bytes_to_home", source.nbytes)
        return super().to_host(source, destination)


class _BaseCopier(_CountingCopier):
    """The copier of streamed weights and gradients. It allocates memory for gradients alone: weights have storages."""

    def to_device(self, source: Tensor, destination: Tensor) -> VirtualTransfer:
        if self._base.labels.kind_of(destination) != GRADIENT:
            self._base.label(destination, STREAMED)
        elif self._base.disk.phases.name != OPTIMIZER:  # in passes another gradient is added to it
            self._base.count("bytes_to_add_to", destination.nbytes)
        return super().to_device(source, destination)

    def to_host(self, source: Tensor, destination: Tensor) -> VirtualTransfer:
        if self._base.labels.kind_of(source) != STREAMED:
            self._base.label(source, GRADIENT)
        return super().to_host(source, destination)

    def release(self, buffer: Tensor) -> None:
        """Label memory that no copy has filled: the casts of weights."""
        self._base.label(buffer, STREAMED)


class VirtualFileHome(HomeInFiles):
    """A home in files that do not exist.

    Reads pass through a ring in host memory part by part, so that a copy ends with the last part after its read.
    """

    def __init__(
        self,
        base: VirtualBase,
        weights: PackedWeights,
        device: torch.device,
        copier: Copier,
        written: BlockHome | None = None,
    ) -> None:
        super().__init__(weights, written)
        self._base, self._copier = base, copier
        on_device = device.type != "cpu"
        self._ring = copier.empty_host(staging_bytes(weights.num_bytes) if on_device else 0)
        self.host_bytes = self._ring.nbytes
        self._views = [[_unread(each) for each in piece.offsets] for piece in weights.slices]

    def to_device(self, start: int, destination: Tensor) -> Transfer:
        self._base.count("bytes_read", destination.nbytes)
        return super().to_device(start, destination)

    def _read(self, start: int, destination: Tensor) -> Transfer:
        read = self._base.disk.reads.copy(destination.nbytes)
        copy = self._copier.to_device(destination, destination)
        assert isinstance(copy, VirtualTransfer)
        last_s = min(PART_BYTES, destination.nbytes) / self._base.clock.card.link_bytes_per_s
        return VirtualTransfer(self._base.clock, max(copy.ended_s, read.ended_s + last_s))

    def rows(self, slice_number: int, place: int, indices: Tensor) -> Tensor:
        return looked_up(self.views[slice_number][place], indices.cpu()).to(indices.device)


def _unread(each: OffsetTensor) -> Tensor:
    """Return a tensor like a weight that counts as no memory of the host, as it is mapped from a file."""
    tensor = each.tensor
    assert isinstance(tensor, FakeTensor)
    with _disable_current_modes():
        seen = torch.empty_strided(tensor.size(), each.stride, dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, seen, _HOST)
