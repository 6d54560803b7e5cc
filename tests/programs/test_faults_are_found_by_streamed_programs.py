"""Tests that random programs find faults planted in streamed weights, one at a time."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from adversarial_copier import AdversarialTransfer
from patience import HANG_S
from streamed_programs import OPTIONS, draw
from streamed_runs import results
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_memopt import StreamedWeights
from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.file_reader import DirectReads
from hf_memopt.transfer.storage_memory import AccessGuard, ResizedMemory
from hf_memopt.weights.residency import guards, selection, storages, units, visiting
from hf_memopt.weights.residency.backward_visits import BackwardVisit, OpenVisits
from hf_memopt.weights.residency.resident_set import ResidentSet
from hf_memopt.weights.residency.units import _Call
from hf_memopt.weights.residency.visiting import Visiting

# Of a module or class, the attribute to replace, and what makes the faulty one of the sound one.
Plant = tuple[Any, str, Callable[[Any], Any]]


class Fault(NamedTuple):
    """A fault, which gives one of the first programs this outcome: of those that have `only` such options, or all."""

    outcome: str
    num_programs: int
    plants: list[Plant]
    only: tuple[str, ...] = ()


def returns(value: Any) -> Callable[[Any], Any]:
    return lambda sound: lambda *args, **kwargs: value


def with_another_byte(sound: Any) -> Any:
    def bring(self: Any, source: Any, destination: Tensor) -> Any:
        copied = sound(self, source, destination)
        copied.wait()
        destination[1] ^= 1
        return copied

    return bring


def and_then(act: Callable[[Any], object]) -> Callable[[Any], Any]:
    def make(sound: Any) -> Any:
        @contextmanager
        def stream(self: Any, path: str = "") -> Iterator[None]:
            with sound(self, path):
                yield
            act(self)

        return stream

    return make


def refuses(message: str) -> Callable[[Any], Any]:
    def refuse(base: Any) -> None:
        raise RuntimeError(message)

    return and_then(refuse)


def is_filled(sound: Any) -> Any:
    def take(self: Any) -> None:
        self.block.data.fill_(255)
        self._is_there = False

    return take


def is_last(sound: Any) -> Any:
    def end(self: Any) -> None:
        sound(self)
        self._is_open = True

    return end


def of_all_users(sound: Any) -> Any:
    def give_up(self: Any, visit: Any, user: object) -> None:
        for number in visit:
            self.storages[number].users.clear()
        sound(self, visit, user)

    return give_up


def of_another_weight(sound: Any) -> Any:
    kept: dict[Any, Any] = {}

    def cast_of(self: Any, visit: Any, weight: Any) -> Any:
        cast = sound(self, visit, weight)
        return cast and kept.setdefault((id(self), cast.tensor.shape), cast)

    return cast_of


def views_with(change: Callable[[Any], Any]) -> list[Plant]:
    return [(storages, "views", lambda sound: lambda offsets, block: sound([change(each) for each in offsets], block))]


# Bytes that are away can be read, and are others.
SILENT: list[Plant] = [(AccessGuard, "close", returns(None)), (ResizedMemory, "take", is_filled)]
FAULTS = {
    "the host brings another byte": Fault("other value", 20, [(SyncCopier, "to_device", with_another_byte)]),
    "files bring another byte": Fault("other value", 20, [(DirectReads, "read", with_another_byte)]),
    "nobody waits for copies": Fault("bad error", 50, [(AdversarialTransfer, "wait", returns(None))]),
    "buffers are zeroed": Fault("other value", 20, [
        (StreamedWeights, "stream", and_then(lambda base: [each.data.zero_() for each in base._model.buffers()])),
    ]),
    "random numbers are drawn": Fault("other value", 20, [
        (Visiting, "begin", lambda sound: lambda *args: (torch.rand(1), sound(*args))[1]),
    ]),
    "a step dies": Fault("signal", 1, [
        (StreamedWeights, "stream", and_then(lambda base: os.kill(os.getpid(), signal.SIGSEGV))),
    ]),
    "a step hangs": Fault("hang", 1, [(StreamedWeights, "stream", and_then(lambda base: time.sleep(3600)))]),
    "an error names no weight": Fault("bad error", 6, [
        (StreamedWeights, "stream", refuses("a weight was read; call remove() first")),
    ]),
    "a needless error names a weight": Fault("needless error", 6, [
        (StreamedWeights, "stream", refuses("frozen weight 'last.weight' was read; call remove() first")),
    ]),
    "only nodes of outputs open visits": Fault("needless error", 50, [
        (_Call, "_nodes", lambda sound: lambda self, tensors: {each.grad_fn for each in tensors} - {None}),
    ]),
    "only outputs are searched for nodes": Fault("NaN", 45, [
        *SILENT,
        (_Call, "_handed_out_otherwise", returns(())),
        (units, "_tensors_in", lambda sound: lambda out: [one for one in tree_leaves(out) if isinstance(one, Tensor)]),
    ]),
    "unannounced reads go unseen": Fault("NaN", 10, [*SILENT, (storages, "set_away", returns(None))]),
    "nodes open no visits": Fault("NaN", 10, [*SILENT, (BackwardVisit, "open", returns(None))]),
    "shared memory is not looked for": Fault("other value", 20, [(selection, "memory_ranges", returns([]))]),
    "rows are looked up without max_norm": Fault("other value", 20, [
        (selection, "why_they_stay", returns({})),
        (visiting, "_looked_up", lambda sound: lambda function, args, kwargs: sound(
            function, args, kwargs | {"max_norm": None}
        )),
    ]),
    "lazy bits are dropped": Fault("other value", 50, [
        (torch, "_conj", lambda sound: lambda each: each), (torch, "_neg_view", lambda sound: lambda each: each),
    ]),
    "views have other strides": Fault("other value", 50, views_with(
        lambda each: each._replace(stride=torch.empty(each.tensor.size(), device="meta").stride())
    )),
    "views have no offsets": Fault("other value", 100, views_with(lambda each: each._replace(start=0))),
    "one tensor of a storage is bound": Fault("needless error", 100, [
        (storages, "bind", lambda sound: lambda offsets, tensors: sound(offsets[:1], tensors[:1])),
    ]),
    "nothing old is closed": Fault("memory", 400, [
        (OpenVisits, "close_calls", returns(False)), (OpenVisits, "close_old", returns(False)),
    ]),
    "a visit opens once": Fault("needless error", 50, [(BackwardVisit, "end", is_last)]),
    "a visit ends though its pass records a graph": Fault("needless error", 50, [
        (BackwardVisit, "close", lambda sound: lambda self, *gradients: self.end()),
    ]),
    "a user leaves for all": Fault("needless error", 30, [(ResidentSet, "_give_up", of_all_users)]),
    "states lack the values": Fault("needless error", 10, [(guards._StateAtHome, "supply", returns(None))]),
    "casts are of another weight": Fault("needless error", 30, [(Visiting, "cast_of", of_another_weight)]),
}  # fmt: skip


SLOW = ("nothing old is closed",)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in FAULTS]
)
@pytest.mark.sweep(share=0.15)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, num_programs, plants, only = FAULTS[name]
    for owner, attribute, make in plants:
        monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    kinds = [each.partition(" ")[0] for each in only]
    without = {f"{kind} {each}" for kind in kinds for each in OPTIONS[kind]}.difference(only)
    found = results([draw(seed, without) for seed in range(num_programs)], 1 if outcome == "hang" else HANG_S)
    assert any(result.outcome == outcome for _, result in found)
