"""What the storages of a running step are for, as far as modules, optimizers and teachers tell."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from hf_memopt.estimate.accounting import categories
from hf_memopt.estimate.accounting.allocation_log import Ledger
from hf_memopt.estimate.accounting.step_phases import Phases


class StepWatch:
    """Labels storages by what they are for, and knows which parameters were trained."""

    def __init__(self, ledger: Ledger, phases: Phases) -> None:
        self._ledger = ledger
        self._phases = phases
        self._trainable: dict[int, tuple[str, nn.Parameter]] = {}
        self._reached: set[int] = set()

    def add_state(self, state: Any) -> None:
        """What setup returned: modules and their weights, optimizers, and tensors, which are inputs."""
        things = list(_things(state, ""))
        modules = [(name, thing) for name, thing in things if isinstance(thing, nn.Module)]
        for name, module in modules:
            self.add_root(module, name if len(modules) > 1 else "")
        self._ledger.label(
            (tensor for _, tensor in things if isinstance(tensor, Tensor) and self._is_unlabelled(tensor)),
            categories.INPUT,
        )

    def add_root(self, module: nn.Module, prefix: str = "") -> None:
        self._phases.add_root(module, prefix)
        for name, parameter in module.named_parameters(prefix=prefix):
            self._label_weight(parameter, categories.PARAMETER if parameter.requires_grad else categories.FROZEN, name)
            if parameter.requires_grad:
                self._trainable.setdefault(id(parameter), (name, parameter))
        for name, buffer in module.named_buffers(prefix=prefix):
            self._label_weight(buffer, categories.BUFFER, name)

    def see_teacher(self, block: Tensor) -> None:
        self._ledger.label([block], categories.TEACHER, "")

    def see_optimizer(self, optimizer: Optimizer, is_over: bool) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if is_over:
            self._ledger.label(tree_leaves(list(optimizer.state.values())), categories.OPTIMIZER_STATE, "")
        else:
            self._reach(parameters)

    def unreached(self) -> tuple[str, ...]:
        """Names of trainable parameters that never had a gradient."""
        self._reach(parameter for _, parameter in self._trainable.values())
        missing = tuple(name for key, (name, _) in self._trainable.items() if key not in self._reached)
        if self._trainable and len(missing) == len(self._trainable):
            raise ValueError("step: no trainable parameter got a gradient, so this was no training step; call backward")
        return missing

    def _reach(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._reached.add(id(parameter))
                name = self._trainable.get(id(parameter), ("", parameter))[0]
                self._ledger.label([parameter.grad], categories.GRADIENT, name)

    def _label_weight(self, weight: Tensor, kind: str, name: str) -> None:
        record = self._ledger.record_of(weight)
        if record is None or record.kind != categories.TEACHER:  # whose block holds many weights
            self._ledger.label([weight], kind, name)

    def _is_unlabelled(self, tensor: Tensor) -> bool:
        record = self._ledger.record_of(tensor)
        return record is None or not record.kind


def _things(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    """Modules, optimizers and tensors in nested containers and dataclasses, with the names under which they lie."""
    if isinstance(value, nn.Module | Optimizer | Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _things(item, str(key))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _things(getattr(value, field.name), field.name)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for position, item in enumerate(value):
            yield from _things(item, str(position))
