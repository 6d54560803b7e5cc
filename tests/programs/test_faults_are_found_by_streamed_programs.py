"""Tests that random programs find faults planted in streamed weights, one at a time."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialTransfer
from streamed_programs import REFUSABLE, Program, draw
from streamed_runs import Result, results
from torch import Tensor

from hf_memopt import StreamedWeights
from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.file_reader import DirectReads

Put = Callable[[pytest.MonkeyPatch], None]
# Sound and faulty runs differ in nothing else.
PLAIN = REFUSABLE | {"form", "after", "kind linear, relu_, linear"}


@dataclass(frozen=True)
class Fault:
    """A fault, found with this outcome within `num_programs`."""

    put: Put
    outcome: str
    num_programs: int
    limit_s: int = 60


def the_host_brings_another_byte(patch: pytest.MonkeyPatch) -> None:
    sound = SyncCopier.to_device

    def to_device(self: Any, source: Tensor, destination: Tensor) -> Any:
        copied = sound(self, source, destination)
        destination[1] ^= 1
        return copied

    patch.setattr(SyncCopier, "to_device", to_device)


def files_bring_another_byte(patch: pytest.MonkeyPatch) -> None:
    sound = DirectReads.read

    def read(self: Any, start: int, destination: Tensor) -> Any:
        reads = sound(self, start, destination)
        reads.wait()
        destination[1] ^= 1
        return reads

    patch.setattr(DirectReads, "read", read)


def nobody_waits_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdversarialTransfer, "wait", lambda self: None)


def _around_stream(patch: pytest.MonkeyPatch, after: Callable[[StreamedWeights, dict[str, Tensor]], None]) -> None:
    sound = StreamedWeights.stream

    @contextmanager
    def stream(self: Any, path: str = "") -> Iterator[None]:
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with sound(self, path):
            yield
        after(self, before)

    patch.setattr(StreamedWeights, "stream", stream)


def writes_to_buffers_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def restore(base: Any, before: dict[str, Tensor]) -> None:
        for name, buffer in base._model.named_buffers():
            buffer.data.copy_(before[name])

    _around_stream(patch, restore)


def random_numbers_are_drawn(patch: pytest.MonkeyPatch) -> None:
    """Plant: the order of random numbers changes, which dropout in a recomputed region shows."""
    sound = StreamedWeights.__init__

    def init(self: Any, model: Any, **options: Any) -> None:
        sound(self, model, **options)
        model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)

    patch.setattr(StreamedWeights, "__init__", init)


def a_step_dies(patch: pytest.MonkeyPatch) -> None:
    _around_stream(patch, lambda base, before: os.kill(os.getpid(), signal.SIGSEGV))


def a_step_hangs(patch: pytest.MonkeyPatch) -> None:
    _around_stream(patch, lambda base, before: time.sleep(3600))


def an_error_names_no_weight(patch: pytest.MonkeyPatch) -> None:
    def refuse(base: Any, before: Any) -> None:
        raise RuntimeError("a weight was read; call remove() first")

    _around_stream(patch, refuse)


def a_needless_error_names_a_weight(patch: pytest.MonkeyPatch) -> None:
    def refuse(base: Any, before: Any) -> None:
        raise RuntimeError("frozen weight 'last.weight' was read; call remove() first")

    _around_stream(patch, refuse)


FAULTS = {
    fault.put.__name__: fault
    for fault in (
        Fault(the_host_brings_another_byte, "other value", 20),
        Fault(files_bring_another_byte, "other value", 20),
        Fault(nobody_waits_for_copies, "bad error", 30),
        Fault(writes_to_buffers_are_dropped, "other value", 40),
        Fault(random_numbers_are_drawn, "other value", 60),
        Fault(a_step_dies, "signal", 1),
        Fault(a_step_hangs, "hang", 1, limit_s=1),
        Fault(an_error_names_no_weight, "bad error", 1),
        Fault(a_needless_error_names_a_weight, "needless error", 1),
    )
}


def look(fault: Fault) -> tuple[int, Program, Result] | None:
    """Return the first program with a fault's outcome, and its number."""
    programs = [draw(seed, PLAIN) for seed in range(fault.num_programs)]
    found = enumerate(results(programs, fault.limit_s), 1)
    return next(((number, *each) for number, each in found if each[1].outcome == fault.outcome), None)


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].put(monkeypatch)
    assert look(FAULTS[name]) is not None
