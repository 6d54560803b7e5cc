"""Threads that make calls: results, errors, and interrupts at any place."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

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


_EXITS = """
import os, sys, time
import torch
from hf_memopt.transfer.direct_io import PAGE, private_pages
from hf_memopt.transfer.scratch_file import ScratchFile
from hf_memopt.transfer.threads import Call, Threads

num_bytes = 2**25
def free_many(memory: list[torch.Tensor]) -> None:
    time.sleep(0.3)  # the interpreter ends meanwhile, or waits
    while memory:
        memory.pop()
    os.write(1, b"made")
threads = Threads(2)
files = [ScratchFile(sys.argv[1]) for _ in range(4)]
memory = private_pages(num_bytes, 5)
for file in files:
    file.write(memory, file.space.acquire(num_bytes))
for _ in range(2):
    threads.submit(Call(lambda memory=[private_pages(PAGE) for _ in range(100)]: free_many(memory)))
del memory, files, file  # their threads end
"""


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.sweep(share=0.5)
def test_the_process_ends_after_calls_that_are_left(raises: bool, tmp_path: Path) -> None:
    code = _EXITS + ("raise RuntimeError('planned')" if raises else "")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (int(raises), "mademade"), done.stderr
    assert "Fatal" not in done.stderr


def test_a_fork_ends_without_the_threads_of_its_parent() -> None:
    code = (
        "import os, sys; from hf_memopt.transfer.threads import Call, Threads; threads = Threads(1); "
        "threads.submit(call := Call(lambda: None)); call.wait(); child = os.fork(); "
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 3, done.stderr
