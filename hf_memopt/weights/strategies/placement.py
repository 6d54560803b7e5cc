"""The interface of strategies for a teacher's weights, and the simple ones: resident and swapped."""

from torch import Tensor, nn

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.weights.homes import WeightsHome
from hf_memopt.weights.packed_weights import PackedWeights, bind, views
from hf_memopt.weights.quantised import inner_tensors
from hf_memopt.weights.residency.away import Classes, set_present

REMEDY_OF_WRITES = "nothing keeps what is written to it; write it before the teacher is made, or use mode='resident'"


class WriteGuard:
    """Notices writes of a module's weights since `begin`, those through `.data` too.

    Args:
        module: whose parameters become watched ones.
        weights: those of the module that are offloaded.
    """

    def __init__(self, module: nn.Module, weights: PackedWeights) -> None:
        self._named = [
            (name, tensor)
            for name, parameter in module.named_parameters()
            if id(parameter) in weights.slices_of
            for tensor in inner_tensors(name, parameter)
        ]
        set_present(Classes.of(each) for each in module.parameters() if id(each) in weights.slices_of)
        self.begin()

    def begin(self) -> None:
        self._versions = [0 if tensor.is_inference() else tensor._version for _, tensor in self._named]

    def check(self, when: str) -> None:
        """Raise RuntimeError, once, for a weight that was written since."""
        versions = self._versions
        self.begin()
        for (name, _), before, now in zip(self._named, versions, self._versions, strict=True):
            if before != now:
                raise RuntimeError(f"teacher weight {name!r} was written {when}; {REMEDY_OF_WRITES}")


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
    """Brings the weights from their home to the device in one block."""

    mode = "swap"
    peak_device_bytes = 0

    def __init__(self, weights: PackedWeights, home: WeightsHome, copier: Copier, reason: str) -> None:
        self.reason = reason
        self.host_bytes = home.host_bytes
        self._weights = weights
        self._home = home
        self._copier = copier
        self._home_views = [view for piece in home.views for view in piece]
        self._block: Tensor | None = None
        self._transfer: Transfer | None = None
        self._is_starting = False
        bind(weights.offsets, self._home_views)

    @property
    def device_bytes(self) -> int:
        """The whole block from `prefetch` on, until the visit ends."""
        return 0 if self._block is None else self._block.nbytes

    def prefetch(self) -> None:
        if self._block is None:
            self._block = self._copier.empty_device(self._home.num_bytes)
            self.peak_device_bytes = self._block.nbytes
        if self._is_starting:
            self._home.settle()  # an interrupt has cut the copy off
        if self._transfer is None:
            self._is_starting = True
            self._transfer = self._home.to_device(0, self._block)
            self._is_starting = False

    def onload(self) -> None:
        self._home.check()
        self.prefetch()
        assert self._transfer is not None
        assert self._block is not None
        self._transfer.wait()
        bind(self._weights.offsets, views(self._weights.offsets, self._block))

    def evict(self, finished: bool) -> None:
        bind(self._weights.offsets, self._home_views)
        try:
            if not finished:
                self._home.settle()  # the copy may be under way, and its memory must not be reused yet
        finally:
            block, self._block, self._transfer, self._is_starting = self._block, None, None, False
            if block is not None:
                self._copier.release(block)
        if finished:
            self._home.check()
