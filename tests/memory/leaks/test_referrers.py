import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from leaky_steps import failing_forward, toy
from torch import Tensor

from hf_memopt.memory.leaks.detect import detect_leaks
from hf_memopt.memory.leaks.leak_report import describe_holder
from hf_memopt.memory.leaks.live_storages import live_storages


def test_a_chain_of_exceptions_is_followed() -> None:
    """Make each exception the cause of the next, and name only the newest."""
    model, _ = toy()
    last: Any = None

    def step() -> None:
        nonlocal last
        try:
            failing_forward(model)
        except ValueError as error:
            error.__cause__ = last
            last = error

    report = detect_leaks(step)
    assert report.leaking
    assert any(
        each.held_by.startswith("last.__cause__.__cause__")
        and "__traceback__ → hidden of failing_forward" in each.held_by
        for each in report.culprits
    )


def test_the_last_exception_of_an_interactive_session_is_found() -> None:
    gc.unfreeze()  # sys is older than the test
    try:
        failing_forward(toy()[0])
    except ValueError as error:
        sys.last_exc = error
    try:
        holder = describe_holder(sys.last_exc.__traceback__)
    finally:
        del sys.last_exc
        gc.collect()
        gc.freeze()
    assert holder == "sys.last_exc.__traceback__"


def test_holder_of_a_tensor_in_a_slot_a_closure_and_a_generator() -> None:
    class Slot:
        __slots__ = ("content",)

    slot = Slot()
    slot.content = [torch.ones(3)]
    holder = describe_holder(slot.content[0])
    assert holder.startswith("slot.content[0], in test_holder_of")

    def enclose() -> Callable[[], Tensor]:
        enclosed = torch.full((7,), 1.0)
        return lambda: enclosed

    def wait() -> Iterator[int]:
        waiting = torch.full((11,), 1.0)
        yield 1
        assert waiting is not None

    function, generator = enclose(), wait()
    next(generator)
    assert holder_of_size(7).startswith("function → enclosed enclosed by test_holder_of")
    assert "generator → waiting of" in holder_of_size(11)
    assert function is not None


def test_the_search_leaves_no_reference_behind() -> None:
    tensor = torch.full((13,), 1.0)
    before = sys.getrefcount(tensor)
    describe_holder(tensor)
    assert sys.getrefcount(tensor) == before


def holder_of_size(size: int) -> str | None:
    found = [entry for entries in live_storages().values() for entry in entries if entry.tensor.shape == (size,)]
    return describe_holder(found[0].tensor, ignore=found)
