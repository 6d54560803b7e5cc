"""Checkpoints of two ranks, a function for each situation, for test_run_state_two_processes.py."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun

from hf_memopt.checkpoint import files


def resumed(folder: Path) -> dict[str, Any]:
    whole = ToyRun(folder / "whole")
    whole.train()
    ToyRun(folder / "run").train(3, save=True)
    run = ToyRun(folder / "run", seed=1)
    run.resume()
    run.train(save=True)
    ours, theirs = run.state(), whole.state()
    return {"differing": [name for name in ours if ours[name] != theirs[name]], "random": str(ours["random"])}


def full_disk_on_one_rank(folder: Path) -> dict[str, Any]:
    run = ToyRun(folder / "run")
    run.resume()
    run.train(7)
    with pytest.MonkeyPatch.context() as patched:
        if run.accelerator.process_index == 1:
            patched.setattr(files, "sync_files", fail)
        message = refusal(run.save)
    again = ToyRun(folder / "run")
    again.resume()
    return {"message": message, "step": again.num_steps}


def damaged(folder: Path) -> dict[str, Any]:
    """Return both ranks' errors; rank 0 alone reads all files."""
    run = ToyRun(folder / "run")
    file = folder / "run" / "step-000006" / "optimizer.bin"
    content = file.read_bytes()
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        file.write_bytes(content[:-1] + b"?")
    run.accelerator.wait_for_everyone()
    message = refusal(run.resume)
    if run.accelerator.is_main_process:
        file.write_bytes(content)
    run.accelerator.wait_for_everyone()
    return {"message": message}


def signal_on_one_rank(folder: Path) -> dict[str, Any]:
    run = ToyRun(folder / "run")
    run.resume()
    try:
        with run.checkpoints.stopping_on_signal():
            while not run.checkpoints.stop_requested():
                run.train(run.num_steps + 1)
                if run.accelerator.process_index == 1 and run.num_steps == 8:
                    os.kill(os.getpid(), signal.SIGTERM)
            run.save()
    except SystemExit as ended:
        return {"status": ended.code, "step": run.num_steps}
    raise AssertionError("went on")


def fail(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def refusal(call: Any) -> str:
    try:
        call()
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("went on")


def outcomes(folder: str) -> dict[str, Any]:
    situations = [resumed, full_disk_on_one_rank, damaged, signal_on_one_rank]
    return {each.__name__: each(Path(folder)) for each in situations}
