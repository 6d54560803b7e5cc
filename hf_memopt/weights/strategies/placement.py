"""The interface of strategies for a teacher's weights, and the simple ones: resident and swapped."""

from torch import Tensor

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.weights.packed_weights import PackedWeights, bind, views


class WeightPlacement:
    """Brings a frozen module's weights to the device for a visit, and drops them afterwards.

    Every method may be called again after an exception. The defaults are those of weights that never move. Attributes
    and properties are those of `TeacherReport`.
    """

    mode: str
    reason: str
    host_bytes = 0
    shared_bytes = 0

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def peak_device_bytes(self) -> int:
        return 0

    def predictions(self) -> dict[str, float | None]:
        """Return the expected costs, as fields of `TeacherReport`."""
        return {}

    def prefetch(self) -> None:
        """Start the copy for the next visit."""

    def onload(self) -> None:
        """Begin a visit: from now on the module can be called on the device."""

    def evict(self, finished: bool) -> None:
        """End a visit; `finished` if no exception ended it."""


class ResidentWeights(WeightPlacement):
    """Keeps the weights in `block`, on the device."""

    mode = "resident"
    device_bytes = peak_device_bytes = 0

    def __init__(self, weights: PackedWeights, block: Tensor, reason: str) -> None:
        bind(weights.offsets, views(weights.offsets, block))
        self.reason = reason
        self.device_bytes = self.peak_device_bytes = block.nbytes


class SwappedWeights(WeightPlacement):
    """Brings the weights to the device in one block, from `master` on the host, which nothing writes again."""

    mode = "swap"
    peak_device_bytes = 0

    def __init__(self, weights: PackedWeights, master: Tensor, copier: Copier, reason: str) -> None:
        self.reason = reason
        self.host_bytes = master.nbytes
        self._weights = weights
        self._master = master
        self._copier = copier
        self._host_views = views(weights.offsets, master)
        self._block: Tensor | None = None
        self._transfer: Transfer | None = None
        bind(weights.offsets, self._host_views)

    @property
    def device_bytes(self) -> int:
        """The whole block from `prefetch` on, until the visit ends."""
        return 0 if self._block is None else self._block.nbytes

    def prefetch(self) -> None:
        if self._block is None:
            block = self._copier.empty_device(self._master.nbytes)
            self._transfer = self._copier.to_device(self._master, block)
            self._block = block
            self.peak_device_bytes = block.nbytes

    def onload(self) -> None:
        self.prefetch()
        self._finish_copy()
        assert self._block is not None
        bind(self._weights.offsets, views(self._weights.offsets, self._block))

    def evict(self, finished: bool) -> None:
        bind(self._weights.offsets, self._host_views)
        # After an exception the copy may still be under way, and its memory must not be reused yet.
        self._finish_copy()
        if self._block is not None:
            self._copier.release(self._block)
            self._block = None

    def _finish_copy(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
