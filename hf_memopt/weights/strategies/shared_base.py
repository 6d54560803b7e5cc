"""Students that are adapters on their teacher: the same model with its adapters switched off."""

from contextlib import ExitStack
from typing import Any

from torch import nn

from hf_memopt.weights.strategies.placement import WeightPlacement


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
    """Return the difference between a student without adapters and its base at the start, in words; None if none."""
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
