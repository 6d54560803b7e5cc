"""Saved storages that are computed again in backward, operation by operation, from others that are there.

This is rematerialisation (Chen et al. 2016) of single tensors instead of modules: the same kernel runs on the same
bytes, so the result is the same bits. Nothing that draws random numbers is ever repeated.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.activations.recompute.op_tracer import OpTracer, TensorRef, TracedOp, map_tensors
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.activations.saved_tensors.shown_elements import elements
from hf_memopt.activations.saved_tensors.storages import LiveStorage
from hf_memopt.autograd_state import StoragePin, VersionGuard, ViewMeta, bytes_of

# Operations that may lie between a storage and its sources.
_MAX_DEPTH = 12


class StoredInput:
    """An operand read from another storage of the pass; saving its storage sets `live` and drops `tensor`."""

    def __init__(self, operand: TensorRef, live: LiveStorage | None, tensor: Tensor | None) -> None:
        self.key, self.meta, self.num_writes = operand.key, operand.meta, operand.num_writes
        self.live, self.tensor = live, tensor
        self.is_saved = live is not None and live.saved_by is not None
        if live is not None:
            self.guard, self.num_bytes = live.twin(), live.num_bytes
        else:
            assert tensor is not None
            self.guard, self.num_bytes = VersionGuard(tensor), tensor.untyped_storage().nbytes()

    def pin(self) -> StoragePin:
        """Return a guard that keeps the storage's key from being given to another one."""
        if self.live is not None:
            return self.live.pin
        assert self.tensor is not None
        return StoragePin.of(self.tensor.untyped_storage())


class WeightInput:
    """A weight operand. It should stay allocated; FSDP and ZeRO may free it before backward (see `was_freed`)."""

    def __init__(self, weight: Tensor, meta: ViewMeta) -> None:
        self._weight, self._meta = weight, meta
        # Not where the operation is noted: inside a dispatch mode an alias has a version of its own.
        self.guard = VersionGuard(weight)
        self._num_bytes = weight.untyped_storage().nbytes()

    def was_freed(self) -> bool:
        return self._weight.untyped_storage().nbytes() != self._num_bytes

    def read(self) -> Tensor:
        """Return the operand; a RuntimeError if it has changed, as in the plain run if autograd has saved it."""
        try:
            self.guard.check()
        except RuntimeError as error:
            error.add_note('A saved tensor was to be computed from this weight again; mode="all" never does that.')
            raise
        if self.was_freed():
            raise RuntimeError(
                f"the memory of a weight of shape {tuple(self._weight.shape)} was freed before a saved tensor could be "
                'computed from it again; use mode="all" if weights are resharded in between'
            )
        return self._meta.of(bytes_of(self._weight))


@dataclass(eq=False)
class ComputedInput:
    """An operand computed on the way, not saved."""

    computation: "Recomputation"
    meta: ViewMeta


class Recomputation:
    """A record whose operands have been found."""

    def __init__(self, record: TracedOp, args: Any, kwargs: Any) -> None:
        self.record, self._args, self._kwargs = record, args, kwargs
        self._operands: list[StoredInput | WeightInput | ComputedInput] = []
        map_tensors(self._operands.append, [args, *kwargs.values()], _INPUTS)

    def steps(self) -> "list[Recomputation]":
        """Return this computation and those of its intermediates, each once."""
        found: dict[Recomputation, None] = {self: None}
        for operand in self._operands:
            if isinstance(operand, ComputedInput):
                found.update(dict.fromkeys(operand.computation.steps()))
        return list(found)

    def modules(self) -> "set[weakref.ref[nn.Module] | None]":
        """Return the innermost modules that performed the operations, where noted; None stands for none."""
        return {step.record.module for step in self.steps()}

    def reads_weights_alone(self) -> bool:
        """Return whether the result is as lasting as the weights that it is made of."""
        return bool(self.steps()) and not self.sources()

    def sources(self) -> list[StoredInput]:
        """Return the sources of the whole computation; a storage read through several views is there several times."""
        return [operand for step in self.steps() for operand in step._operands if isinstance(operand, StoredInput)]

    def operations(self) -> tuple[Any, ...]:
        """Return the operations, and which of their sources were saved: equal in passes that do the same."""
        steps = tuple((step.record.func, step.record.output) for step in self.steps())
        return steps, tuple(source.is_saved for source in self.sources())

    def checks(self) -> list[Callable[[], bool]]:
        """Return checks whether operands have changed, but for sources not saved by autograd, which are copied."""
        operands = [operand for step in self.steps() for operand in step._operands]
        lasting = [operand for operand in operands if not isinstance(operand, ComputedInput)]
        modified = [each.guard.was_modified for each in lasting if isinstance(each, WeightInput) or each.is_saved]
        return modified + [operand.was_freed for operand in operands if isinstance(operand, WeightInput)]

    def run(self, memory: dict[LiveStorage, Tensor]) -> Tensor:
        """Return the result's storage as bytes, given those of every source."""
        # An intermediate result is held only until its last reader has it.
        operands = [operand for step in self.steps() for operand in step._operands]
        reads = Counter(operand.computation for operand in operands if isinstance(operand, ComputedInput))
        return self._run(memory, reads, {})

    def _run(
        self, memory: dict[LiveStorage, Tensor], reads: "Counter[Recomputation]", done: "dict[Recomputation, Tensor]"
    ) -> Tensor:
        def read(operand: StoredInput | WeightInput | ComputedInput) -> Tensor:
            if isinstance(operand, WeightInput):
                return operand.read()
            if isinstance(operand, StoredInput):
                assert operand.live is not None
                return operand.meta.of(memory[operand.live])
            reads[operand.computation] -= 1
            result = done.pop(operand.computation, None)
            if result is None:
                result = operand.computation._run(memory, reads, done)
            if reads[operand.computation]:
                done[operand.computation] = result
            return operand.meta.of(result)

        args = map_tensors(read, self._args, _INPUTS)
        result = self.record.func(
            *args, **{name: map_tensors(read, value, _INPUTS) for name, value in self._kwargs.items()}
        )
        return bytes_of(result if self.record.output is None else result[self.record.output])


_INPUTS = (StoredInput, WeightInput, ComputedInput)


class Resolver:
    """Finds the operations and sources by which one storage could be computed again.

    An operand is, in this order: a weight; a storage that the pass has saved; the result of light operations on such;
    or bytes that are alive for another reason and can be saved for this purpose.
    """

    def __init__(self, op_tracer: OpTracer, find_live: Callable[[int], LiveStorage | None]) -> None:
        self._op_tracer, self._find_live = op_tracer, find_live
        self._computations: dict[TracedOp, Recomputation] = {}

    def resolve(self, operand: TensorRef) -> Recomputation | None:
        record = self._op_tracer.record_of(operand)
        return None if record is None else self._compute(record, _MAX_DEPTH, pure=False)

    def _compute(self, record: TracedOp, depth: int, pure: bool) -> Recomputation | None:
        if record in self._computations:
            return self._computations[record]
        missing = False

        def find(operand: TensorRef) -> Any:
            nonlocal missing
            found = None if missing else self._find(operand, depth, pure)
            missing = missing or found is None
            return found

        args = map_tensors(find, record.args, TensorRef)
        kwargs = {name: map_tensors(find, value, TensorRef) for name, value in record.kwargs.items()}
        if missing:
            return None
        self._computations[record] = Recomputation(record, args, kwargs)
        return self._computations[record]

    def _find(self, operand: TensorRef, depth: int, pure: bool) -> StoredInput | WeightInput | ComputedInput | None:
        if operand.weight is not None:
            is_same = operand.weight._version == operand.version and self._op_tracer.is_unwritten(operand)
            return WeightInput(operand.weight, operand.meta) if is_same else None
        if operand.is_leaf or operand.key in self._op_tracer.distrusted:
            return None
        # Autograd holds its bytes anyway, so reading them costs nothing.
        live = self._live(operand)
        if live is not None and live.saved_by is not None:
            return StoredInput(operand, live, None)
        record = self._op_tracer.record_of(operand) if depth else None
        # Intermediates must need nothing new to be saved; else the operand itself is the better thing to save.
        light = self._compute(record, depth - 1, pure=True) if record is not None and record.light else None
        if light is not None:
            return ComputedInput(light, operand.meta)
        if pure:
            return None
        # Alive elsewhere, so that the pass can save it as a source.
        tensor = operand.alive() if live is None and self._op_tracer.is_unwritten(operand) else None
        return StoredInput(operand, live, tensor) if live is not None or tensor is not None else None

    def _live(self, operand: TensorRef) -> LiveStorage | None:
        live = self._find_live(operand.key)
        if live is None or live.version != operand.version or live.was_modified():
            return None
        if live.of_function or not live.shown.include(elements(*operand.meta.geometry)):
            return None
        # Writes through `.data` show in their count alone, and writes without a count in the version counter.
        tensor = operand.alive()
        is_same = live.num_writes == operand.num_writes and (tensor is None or live.covers(tensor))
        return live if is_same else None


class RecomputedStorage(LiveStorage):
    """Computed again when needed, from live sources that it keeps until then, and held until its last need."""

    def __init__(
        self, tensor: Tensor, device: DeviceState, index: int, computation: Recomputation, owner: str | None
    ) -> None:
        self._sources: list[LiveStorage] = []
        super().__init__(tensor, device, index, owner=owner)
        self._computation: Recomputation | None = computation
        self._device_type = tensor.device.type
        self._memory: Tensor | None = None
        self._computed_in = 0
        sources = [source.live for source in computation.sources() if source.live is not None]
        self._sources = list(dict.fromkeys(sources))
        for source in self._sources:
            source.num_dependents += 1

    def ripen(self) -> None:
        """Do nothing: this kind is never pending."""

    def _bring(self, backward: int) -> Tensor:
        if self._memory is None:
            with self._range("recompute"):
                self._memory = self._compute(backward)
            assert self._memory.nbytes == self.num_bytes
            if not self.is_read_again():  # then the result stays for as long as it may be asked for
                self._drop_sources()
        return self._memory

    def _compute(self, backward: int) -> Tensor:
        # Its sources count how often they are asked: once by this storage in each backward.
        is_first = self._computed_in != backward
        self._computed_in = backward
        memory = {source: source.fetch(backward, is_first) for source in self._sources}
        self._count()
        assert self._computation is not None
        # Operations were noted below autograd and autocast, with their casts made.
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            return self._computation.run(memory)

    def _give_up(self) -> None:
        if self._computation is None:  # it could not be made a second time
            return
        self._memory = None
        self._uncount_after_node()

    def _drop_sources(self) -> None:
        for source in self._sources:
            source.num_dependents -= 1
        self._sources = []
        self._computation = None

    def _forget(self) -> None:
        self._drop_sources()
        super()._forget()
