"""The strategies for a teacher's weights: resident, swapped, streamed, and shared with a student."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.weights.homes.home import WeightsHome
from hf_memopt.weights.homes.packed_weights import PackedWeights, bind, inner_tensors, views
from hf_memopt.weights.residency.away import Classes, set_present
from hf_memopt.weights.residency.resident_set import Visit, forecast
from hf_memopt.weights.residency.visiting import Visiting

REMEDY_OF_WRITES = "nothing keeps what is written to it; write it before the teacher is made, or use mode='resident'"


class WriteGuard:
    """Notices what is written to a teacher's weights, and bound to them, in visits and between.

    Args:
        module: whose parameters become watched ones.
        shared: parameters in the student's memory.
    """

    def __init__(
        self, module: nn.Module, weights: PackedWeights, home: WeightsHome, shared: Sequence[nn.Parameter]
    ) -> None:
        tensors = [each.tensor for each in weights.offsets]
        self._at_home = list(zip(tensors, (view for piece in home.views for view in piece), strict=True))
        self._keeps_writes = not home.file_bytes
        guarded = {id(each) for each in (*tensors, *shared)}
        self._named = [
            (name, tensor)
            for name, parameter in module.named_parameters()
            for tensor in (inner_tensors(name, parameter) if id(parameter) in weights.slices_of else [parameter])
            if id(tensor) in guarded
        ]
        set_present(Classes.of(each) for each in module.parameters() if id(each) in {*weights.slices_of, *guarded})
        self.note()

    def note(self) -> None:
        self._states = self._present_states()

    def forget(self) -> None:
        """Begin a change of what the weights are bound to, after which `note` follows, unless an interrupt comes."""
        self._states = []

    def written(self) -> str | None:
        """Return the name of a weight that was written, or bound to other memory, since `note`."""
        changed = zip(self._named, self._states, self._present_states(), strict=False)
        return next((name for (name, _), before, now in changed if before != now), None)

    def keep_writes(self) -> None:
        """Make the home keep what was written since the last visit; RuntimeError where it cannot."""
        name = self.written()
        if name is not None and not self._keeps_writes:
            self.note()
            raise RuntimeError(f"teacher weight {name!r} was written between visits; {REMEDY_OF_WRITES}")
        for tensor, view in self._at_home if name is not None else ():
            if tensor.untyped_storage()._cdata != view.untyped_storage()._cdata:
                if (tensor.dtype, tensor.device, tensor.shape) != (view.dtype, view.device, view.shape):
                    changed = next(name for name, each in self._named if each is tensor)
                    raise RuntimeError(
                        f"teacher weight {changed!r} was cast, moved or resized between visits; make "
                        "the teacher of the module as it is now"
                    )
                view.copy_(tensor)

    def _present_states(self) -> list[tuple[int, int]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [
                (0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata)
                for _, tensor in self._named
            ]


class WeightPlacement:
    """Brings a frozen module's weights to the device for a visit, and drops them afterwards.

    Every method may be called again after an exception. The defaults are those of weights that never move. Attributes
    are those of `TeacherReport`.
    """

    mode: str
    reason: str
    host_bytes = 0
    shared_bytes = 0

    def device_memory(self) -> tuple[int, int]:
        """Return the bytes on the device now, and their peak."""
        return 0, 0

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

    def __init__(self, weights: PackedWeights, block: Tensor, reason: str) -> None:
        bind(weights.offsets, views(weights.offsets, block))
        self.reason = reason
        self._num_bytes = block.nbytes

    def device_memory(self) -> tuple[int, int]:
        return self._num_bytes, self._num_bytes


class SwappedWeights(WeightPlacement):
    """Brings the weights from their home to the device in one block."""

    mode = "swap"

    def __init__(self, weights: PackedWeights, home: WeightsHome, copier: Copier, reason: str) -> None:
        self.reason = reason
        self.host_bytes = home.host_bytes
        self._weights = weights
        self._home = home
        self._copier = copier
        self._home_views = [view for piece in home.views for view in piece]
        self._block: Tensor | None = None
        self._peak_bytes = 0
        self._transfer: Transfer | None = None
        self._is_starting = False
        bind(weights.offsets, self._home_views)

    def device_memory(self) -> tuple[int, int]:
        return 0 if self._block is None else self._block.nbytes, self._peak_bytes

    def prefetch(self) -> None:
        if self._block is None:
            self._block = self._copier.empty_device(self._home.num_bytes)
            self._peak_bytes = self._block.nbytes
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


class SharedBase(WeightPlacement):
    """Makes the base of a `peft.PeftModel` its own teacher. No second copy exists, and nothing moves.

    For each visit the adapters are disabled and the whole model is in evaluation mode, so that dropout is off.

    Raises ValueError if the student without adapters would not compute the teacher's results of the start.
    """

    mode = "shared"
    reason = "the teacher is the student with its adapters disabled"

    def __init__(self, student: nn.Module) -> None:
        why_not = why_base_differs(student)
        if why_not:
            raise ValueError(
                f"the student's base cannot be its teacher: {why_not}; give the teacher a model of its own"
            )
        self._student = student
        self._stack = ExitStack()
        self.shared_bytes = sum(p.nbytes for p in student.parameters() if not p.requires_grad)

    def onload(self) -> None:
        """Switch the adapters off; RuntimeError if they were merged into the base since the start."""
        why_not = why_base_differs(self._student)
        if why_not:
            raise RuntimeError(f"the student's base is its teacher no longer: {why_not}")
        student: Any = self._student
        # PEFT and evaluation mode change these.
        for parameter in student.parameters():
            self._stack.callback(parameter.requires_grad_, parameter.requires_grad)
        for module in student.modules():
            self._stack.callback(setattr, module, "training", module.training)
        self._stack.enter_context(student.disable_adapter())
        student.train(False)

    def evict(self, finished: bool) -> None:
        self._stack.close()


def why_base_differs(student: nn.Module) -> str | None:
    """Return the difference between a student without adapters and its base at the start, in words, or None if none."""
    if not hasattr(student, "disable_adapter"):
        return f"{type(student).__name__} is not a PeftModel, whose disable_adapter() switches adapters off"
    adapters = _adapter_parameters(student)
    for name, parameter in student.named_parameters():
        if hasattr(parameter, "device_mesh") or hasattr(parameter, "_is_flat_param"):
            return f"{name} is sharded, and FSDP gathers weights for one path through the model only"
        if parameter.requires_grad and id(parameter) not in adapters:
            return f"the student trains {name}, which belongs to the base (use bias='none')"
    for name, module in student.named_modules():
        if getattr(module, "merged", False):
            return f"the adapter of {name} is merged into the base, and subtracting it again would round"
        if getattr(module, "running_mean", None) is not None:
            return f"{name} keeps running statistics, which the student's training changes"
    return None


def _adapter_parameters(student: nn.Module) -> set[int]:
    """Return the ids of parameters of PEFT's layers that are unused while adapters are disabled."""
    found: set[int] = set()
    for module in student.modules():
        layers = (getattr(module, name, None) for name in getattr(module, "adapter_layer_names", ()))
        for layer in layers:
            if isinstance(layer, nn.Module):  # a ModuleDict or a ParameterDict
                found |= {id(p) for p in layer.parameters()}
    return found


class StreamedVisits(WeightPlacement):
    """Streams a module's weights through a little device memory while the module runs.

    Each weight comes as it is read, and the next ones are on their way, in the order of the visit before. Weights that
    a visit reads again and again stay meanwhile, as far as the budget allows; unread ones never travel. Rows of
    embeddings are looked up at home. Between visits nothing is on the device.

    Args:
        budget_bytes: device memory. What a module reads is allowed anyway, with what the next one reads. None: what is
            read again stays until it is read no more.
    """

    mode = "stream"

    def __init__(
        self,
        module: nn.Module,
        weights: PackedWeights,
        home: WeightsHome,
        copier: Copier,
        budget_bytes: int | None,
        reason: str,
    ) -> None:
        self.reason = reason
        self.host_bytes = home.host_bytes
        self._home = home
        self._sizes = [piece.num_bytes for piece in weights.slices]
        self._budget_bytes = math.inf if budget_bytes is None else budget_bytes
        self._visits: list[Visit] = []
        self._visiting = Visiting(
            module,
            weights,
            home,
            copier.empty_device(0).device,
            copier,
            self._budget_bytes,
            repeats=False,
            remedy="call the teacher, and read its weights, inside `with teacher.onload():`",
            remedy_of_writes=REMEDY_OF_WRITES,
        )
        self._visiting.finish(home.views, has_failed=False)

    def device_memory(self) -> tuple[int, int]:
        return self._visiting.storages.device_bytes, self._visiting.storages.peak_device_bytes

    @property
    def is_known(self) -> bool:
        """Return whether a visit has been finished in which weights were read."""
        return bool(self._visits)

    def predictions(self) -> dict[str, float | None]:
        return {"predicted_device_bytes": self.forecast(self._budget_bytes)[0]} if self.is_known else {}

    def forecast(self, budget_bytes: float) -> tuple[int, int]:
        """Return the peak of the device memory within a budget, and the bytes that a visit like the last one copies."""
        return forecast(self._visits, self._sizes, max(budget_bytes, self._visiting.storages.visit_bytes or 0))

    def set_budget(self, budget_bytes: float) -> None:
        self._budget_bytes = budget_bytes
        self._visiting.storages.set_budget(budget_bytes)

    def prefetch(self) -> None:
        with self._visiting.lock:
            self._visiting.storages.look_ahead()

    def onload(self) -> None:
        self._home.check()
        self._visiting.bind()
        self._visiting.is_active = True
        self.prefetch()

    def evict(self, finished: bool) -> None:
        """End a visit. A finished one, without an exception, is expected again."""
        visits = self._visiting.finish(self._home.views, not finished)
        if finished and visits:
            self._visits = list(visits)
        if finished:
            self._home.check()

    def close(self) -> None:
        """Give up device memory and hooks, between visits."""
        self._visiting.finish(self._home.views, has_failed=True)
        self._visiting.remove()
