"""Work in a process of its own: errors keep their types, and a process that dies is an error."""

import gc
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from estimate_runs import State, mlp_setup, step

from hf_memopt.planning.estimate import estimate_peak_memory
from hf_memopt.planning.simulation.child_process import IsolatedError, run_all_isolated, run_isolated


def test_errors_of_the_step_arrive_with_their_traceback() -> None:
    def refuses(device: torch.device) -> State:
        raise ValueError("seq_len=0 is too short")

    def breaks(state: State) -> None:
        state.missing()

    with pytest.raises(ValueError, match="seq_len=0 is too short") as caught:
        estimate_peak_memory(refuses, step)
    assert "in refuses" in caught.value.__notes__[0]
    with pytest.raises(IsolatedError, match=r"(?s)AttributeError: 'State' object.*in breaks"):
        estimate_peak_memory(mlp_setup, breaks)


def test_a_killed_simulation_is_an_error() -> None:
    def dies(state: State) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(IsolatedError, match="died with exit code -9"):
        estimate_peak_memory(mlp_setup, dies)


# A fork after autograd's threads have started, with or without an accelerator in the machine.
TOO_LATE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from hf_memopt.planning.simulation.child_process import run_isolated

def backward():
    torch.zeros(1, requires_grad=True).sum().backward()

{before}
try:
    run_isolated(backward)
except ValueError as error:
    print(error)
else:
    print("forked")
"""
FAKE_FIRST = "with FakeTensorMode(): torch.zeros(1, device='cuda')\nbackward()"
BACKWARD_FIRST = "backward()\nwith FakeTensorMode(): torch.zeros(1, device='cuda')"


@pytest.mark.canary
def test_a_fork_that_comes_too_late_is_explained() -> None:
    """Check the error after a first backward, in which autograd starts its threads for the devices that it finds."""
    assert "estimate and plan before the first backward, or in a process of their own" in said_by(FAKE_FIRST)
    assert said_by(BACKWARD_FIRST) == "forked"


def said_by(before: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", TOO_LATE.format(before=before)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_results_come_back_from_several_processes_at_a_time() -> None:
    pids = list(run_all_isolated([os.getpid] * 5, num_workers=2))
    assert len({*pids, os.getpid()}) == 6


def test_what_was_there_before_is_not_collected_again() -> None:
    assert run_isolated(gc.get_freeze_count) > gc.get_freeze_count()


# Both children outgrow a pipe's buffer; the second computes until then, and has inherited the first one's pipe.
ENDLESS = """
import sys, time
from hf_memopt.planning.simulation.child_process import run_all_isolated

def sleeps():
    print("running", flush=True)
    time.sleep(1)
    return bytes(10_000_000)

def computes():
    print("running", flush=True)
    while True:
        sum(range(1000))

for result in run_all_isolated([sleeps, computes], num_workers=2):
    time.sleep(1000)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
@pytest.mark.sweep(share=0.5)
def test_children_end_soon_after_their_parent_was_killed(sent: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        parent.send_signal(sent)
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            child.kill()
    assert not alive
