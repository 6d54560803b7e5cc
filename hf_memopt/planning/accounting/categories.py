"""The uses of a simulated step's storages, as far as modules, optimizers and teachers tell; the visits of weights."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hf_memopt.planning.accounting.allocation_log import (
    FORWARD,
    OPTIMIZER,
    SETUP,
    AllocationHistory,
    AllocationLog,
    StorageRecord,
)
from hf_memopt.planning.accounting.operation import Operation, name_of, tensors_in
from hf_memopt.units import format_gib
from hf_memopt.weights.optimizer import OffloadedOptimizer

# In the order in which they are drawn, from the bottom up.
CATEGORIES = (
    FROZEN := "frozen parameters",
    STREAMED := "streamed weights",
    TEACHER := "teacher",
    PARAMETER := "parameters",
    BUFFER := "buffers",
    INPUT := "inputs",
    OPTIMIZER_STATE := "optimizer state",
    COMMUNICATION := "communication buffers",
    GRADIENT := "gradients",
    GATHERED := "gathered weights",
    ACTIVATION := "activations",
    TEMPORARY := "temporaries",
    WORKSPACE := "library workspaces",
    UNUSED := "unused ends of blocks",
)


class StepLabels:
    """Labels storages by their use, and knows which parameters were trained.

    Those of modules and optimizers are labelled when these run, at the latest. The results of operations stay without a
    label: whether one is an activation shows only when backward begins, so `alive_at` decides it after the run.
    """

    def __init__(self, log: AllocationLog) -> None:
        self._log, self._phases = log, log.phases
        self._trainable: dict[int, tuple[str, nn.Parameter]] = {}
        self._reached: set[int] = set()
        # The phases that running updates have interrupted.
        self._interrupted: list[str] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        with (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(lambda *_: self._phases.leave(), always_call=True),
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ):
            yield

    def add_state(self, state: Any) -> None:
        things = list(_things(state, ""))
        modules = [(name, thing) for name, thing in things if isinstance(thing, nn.Module)]
        for name, module in modules:
            self.add_root(module, name if len(modules) > 1 else "")
        self.add_unlabelled((thing for _, thing in things if isinstance(thing, Tensor)), INPUT)

    def add_root(self, module: nn.Module, prefix: str = "") -> None:
        self._phases.add_root(module, prefix)
        for name, parameter in module.named_parameters(prefix=prefix):
            self._label_weight(parameter, PARAMETER if parameter.requires_grad else FROZEN, name)
            if parameter.requires_grad:
                self._trainable.setdefault(id(parameter), (name, parameter))
        for name, buffer in module.named_buffers(prefix=prefix):
            self._label_weight(buffer, BUFFER, name)

    def add(self, tensors: Iterable[Any], kind: str, owner: str = "") -> None:
        self._log.label(tensors, kind, owner)

    def add_unlabelled(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Label tensors whose memory is not known as something else."""
        records = ((tensor, self._log.record_of(tensor)) for tensor in tensors)
        self._log.label((tensor for tensor, record in records if record is None or not record.kind), kind)

    def kind_of(self, tensor: Tensor) -> str:
        record = self._log.record_of(tensor)
        return "" if record is None else record.kind

    def reach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients of parameters, which may be gone before the update."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._reached.add(id(parameter))
                name = self._trainable.get(id(parameter), ("", parameter))[0]
                self._log.label([parameter.grad], GRADIENT, name)

    def unreached(self) -> tuple[str, ...]:
        self.reach(parameter for _, parameter in self._trainable.values())
        missing = tuple(name for key, (name, _) in self._trainable.items() if key not in self._reached)
        if self._trainable and len(missing) == len(self._trainable):
            raise ValueError(
                "step: no trainable parameter got a gradient, so this was not a training step; call backward"
            )
        return missing

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if not self._phases.knows(module):
            self.add_root(module, self._phases.module)
        self._phases.enter(module)

    def _begin_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        # Of no module, such as the copy in float32 of a rank's share.
        self.add_unlabelled(tensors_in(trained), OPTIMIZER_STATE)
        self.reach(trained)
        self._interrupted.append(self._phases.name)
        self._phases.name = OPTIMIZER

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        inner = optimizer.optimizer if isinstance(optimizer, OffloadedOptimizer) else optimizer
        self._log.label(tree_leaves(list(inner.state.values())), OPTIMIZER_STATE, "")
        self._phases.name = self._interrupted.pop()

    def updating(self) -> AbstractContextManager[None]:
        """Count everything inside to the update: engines have steps of their own around that of an optimizer."""
        return self._phases.named(OPTIMIZER)

    def _label_weight(self, weight: Tensor, kind: str, name: str) -> None:
        record = self._log.record_of(weight)
        if record is None or record.kind not in (TEACHER, STREAMED):  # whose block holds many weights
            self._log.label([weight], kind, name)


def _things(value: Any, name: str) -> Iterable[tuple[str, Any]]:
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


def exchanged(operation: Operation) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the tensors of an operation of FSDP2 with their use; nothing for other operations.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py of torch 2.11. Shards are gathered into one buffer,
    from which the weights are copied; gradients are copied into another one, which is reduced to the shards' gradients.
    """
    match name_of(operation.function):
        case "c10d._allgather_base_.default":
            yield COMMUNICATION, [operation.args[0]]
        case "c10d._reduce_scatter_base_.default":
            yield COMMUNICATION, [operation.args[1]]
        case "fsdp.split_with_sizes_copy.default":
            yield GATHERED, operation.kwargs["out"]


def alive_at(history: AllocationHistory, position: int) -> list[tuple[str, StorageRecord]]:
    live = [
        record
        for record in history.records
        if not record.on_host and record.born <= position and (record.died is None or record.died > position)
    ]
    return sorted(((_kind(record, history), record) for record in live), key=lambda pair: -pair[1].num_bytes)


def of_storages(history: AllocationHistory) -> tuple[str, ...]:
    return tuple(_kind(record, history) for record in history.records)


def peak_of(history: AllocationHistory, kind: str) -> int:
    """Return the most bytes that storages of one use have held on the device at once."""
    held = accumulate(
        change.num_bytes
        for change in history.changes
        if history.records[change.storage].kind == kind and not history.records[change.storage].on_host
    )
    return max(held, default=0)


def breakdown(live: list[tuple[str, StorageRecord]], allocated_bytes: int) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for kind, record in live:
        totals[kind] += record.num_bytes
    if unused := allocated_bytes - totals.total():
        totals[UNUSED] = unused
    return dict(totals.most_common())


def _kind(record: StorageRecord, history: AllocationHistory) -> str:
    """An activation is made in a forward pass and still alive when the next backward begins."""
    if record.kind:
        return record.kind
    if record.phase == SETUP:
        return INPUT
    backward = history.next_backward(record.born)
    outlives = backward is not None and (record.died is None or record.died > backward)
    return ACTIVATION if record.phase == FORWARD and outlives else TEMPORARY


@dataclass(frozen=True, slots=True)
class StreamedEstimate:
    """The visits of weights that stream (`StreamedWeights`), with gradients and optimizer state that have a home."""

    peak_bytes: int  # of device memory for weights, small ones that stay left out
    bytes_to_device: int = 0  # brought in a step, or an update
    bytes_read: int = 0  # of these, weights from files
    bytes_to_home: int = 0  # gradients, weights and state that go back
    # Parts of these that move outside of passes.
    update_bytes_to_device: int = 0
    update_bytes_read: int = 0
    update_bytes_to_home: int = 0
    bytes_to_add_to: int = 0  # gradients brought in all passes of an update but the first

    def __str__(self) -> str:
        files = ", read from files" if self.bytes_read else ""
        back = f", {format_gib(self.bytes_to_home)} written back" if self.bytes_to_home else ""
        return (
            f"{format_gib(self.peak_bytes)} of the device at most, {format_gib(self.bytes_to_device)} brought in a "
            f"step{files}{back}"
        )

    def with_passes(self, times: float) -> "StreamedEstimate":
        """Return it for an update of `times` as many passes; where that is more, two were simulated."""
        more, added = times - 1, self.bytes_to_add_to
        return replace(
            self,
            bytes_to_device=self.bytes_to_device
            + round(more * (self.bytes_to_device - self.update_bytes_to_device + added)),
            bytes_read=self.bytes_read + round(more * (self.bytes_read - self.update_bytes_read)),
            bytes_to_home=self.bytes_to_home + round(more * (self.bytes_to_home - self.update_bytes_to_home)),
            bytes_to_add_to=added + round(2 * more * added),
        )
