"""Threads that make calls: results, errors, and interrupts at any place."""

import gc
import sys
import threading
import weakref

import pytest
from interrupts import Interrupter
from patience import HANG_S, wait_for

from hf_memopt.transfer.threads import Call, Threads


def test_calls_are_made_elsewhere_and_once() -> None:
    threads, made = Threads(2), list[int]()
    calls = [Call(lambda number=number: made.append(number) or threading.get_ident()) for number in range(20)]
    for call in [*calls, *calls]:
        threads.submit(call)
    assert threading.get_ident() not in {call.result() for call in calls}
    assert sorted(made) == list(range(20))


def test_errors_are_raised_to_those_who_wait_and_end_no_thread() -> None:
    threads = Threads(1)
    broken, after = Call(lambda: 1 // 0), Call(lambda: 1)
    threads.submit(broken)
    threads.submit(after)
    assert isinstance(broken.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert after.result() == 1


def test_threads_end_with_their_object() -> None:
    threads, all_at_work = Threads(3), threading.Barrier(3)

    def identity() -> int:
        all_at_work.wait(HANG_S)
        return threading.get_ident()

    calls = [Call(identity) for _ in range(3)]
    for call in calls:
        threads.submit(call)
    identities = {call.result() for call in calls}
    assert len(identities) == 3
    assert identities <= sys._current_frames().keys()
    del threads
    wait_for(lambda: identities.isdisjoint(sys._current_frames()))


def test_a_call_that_was_made_holds_no_memory() -> None:
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    call = Call(lambda memory=memory: None)
    call()
    del memory
    gc.collect()
    assert gone() is None
    assert call.done()


def test_an_interrupt_at_any_place_leaves_them_at_work() -> None:
    interrupter = Interrupter("transfer/threads.py", "threading.py", "queue.py", "concurrent/futures")
    threads = Threads(2)

    def submit() -> None:
        threads.submit(call := Call(lambda: None))
        call.wait()

    for _ in range(3):  # the first ones start threads
        interrupter.call(submit)
    for number in range(1, interrupter.count + 1):
        interrupter.call(submit, number)
        assert interrupter.place
        threads.submit(after := Call(lambda: None))
        wait_for(after.done)
