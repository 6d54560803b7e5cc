"""Work in a process of its own: errors come back as what they were, and a process that dies is one."""

import os
import signal

import pytest
import torch
from estimate_runs import State, mlp_setup, step

from hf_memopt.estimate.estimate import estimate_peak_memory
from hf_memopt.estimate.simulation.child_process import IsolatedError, run_all_isolated, run_isolated


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


def test_a_fork_that_comes_too_late_is_explained() -> None:
    def engine() -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with pytest.raises(ValueError, match="estimate and plan before the first backward, or in a process of their own"):
        run_isolated(engine)


def test_results_come_back_from_several_processes_at_a_time() -> None:
    pids = list(run_all_isolated([os.getpid] * 5, num_workers=2))
    assert len({*pids, os.getpid()}) == 6
