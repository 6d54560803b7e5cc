"""Where a teacher's weights are, between its visits to the device and during them."""

from typing import Protocol

from torch import Tensor

from hf_memopt.teacher.packed_weights import PackedWeights, bind, views
from hf_memopt.transfer import Copier, Transfer


class Residency(Protocol):
    """What brings a frozen module's weights to the device. Every method may be called again after an exception.

    Attributes:
        mode: its name in `TeacherReport`.
        host_bytes: the weights' bytes in host memory.
        device_bytes: and on the device, now.
        peak_device_bytes: the most that these were.
    """

    @property
    def mode(self) -> str: ...

    @property
    def host_bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def peak_device_bytes(self) -> int: ...

    def prefetch(self) -> None:
        """Start the copy for the next visit."""

    def arrive(self) -> None:
        """Begin a visit: from now on the module can be called on the device."""

    def leave(self, finished: bool) -> None:
        """End a visit; `finished` if no exception ended it."""


class ResidentWeights:
    """Weights that stay on the device. Nothing moves after the start.

    Args:
        weights: packed into `block`.
        block: on the device.
    """

    mode = "resident"
    host_bytes = 0

    def __init__(self, weights: PackedWeights, block: Tensor) -> None:
        bind(weights.places, views(weights.places, block))
        self.device_bytes = self.peak_device_bytes = block.nbytes

    def prefetch(self) -> None:
        """Nothing to do."""

    def arrive(self) -> None:
        """Nothing to do."""

    def leave(self, finished: bool) -> None:
        """Nothing to do."""


class SwappedWeights:
    """Weights that visit the device in one block.

    Args:
        weights: packed into `master`.
        master: in host memory. Never written again, so that a visit has nothing to bring back.
        copier: how bytes move.
    """

    mode = "swap"

    def __init__(self, weights: PackedWeights, master: Tensor, copier: Copier) -> None:
        self._weights = weights
        self._master = master
        self._copier = copier
        self._home = views(weights.places, master)
        self._block: Tensor | None = None
        self._transfer: Transfer | None = None
        self.peak_device_bytes = 0
        bind(weights.places, self._home)

    @property
    def host_bytes(self) -> int:
        """The master copy."""
        return self._master.nbytes

    @property
    def device_bytes(self) -> int:
        """The whole block from `prefetch` on, until the visit ends."""
        return 0 if self._block is None else self._block.nbytes

    def prefetch(self) -> None:
        """Start the copy, if it is not under way."""
        if self._block is None:
            block = self._copier.empty_device(self._master.nbytes)
            self._transfer = self._copier.to_device(self._master, block)
            self._block = block
            self.peak_device_bytes = block.nbytes

    def arrive(self) -> None:
        """Have the compute stream wait for the copy, and point the module at it."""
        self.prefetch()
        self._finish_copy()
        assert self._block is not None
        bind(self._weights.places, views(self._weights.places, self._block))

    def leave(self, finished: bool) -> None:
        """Point the module at the host again and drop the copy."""
        bind(self._weights.places, self._home)
        # After an exception the copy may still be under way, and then its memory must not be reused yet.
        self._finish_copy()
        if self._block is not None:
            self._copier.release(self._block)
            self._block = None

    def _finish_copy(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
