"""A run of two ranks, one of them killed at a random moment, saving or not, for test_killed_ranks.py."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

from toy_run import ToyRun

LONGEST_S = 0.4  # about twenty checkpoints
STEPS_AT_THE_END = 3


def attempt_to_train(run_folder: str, attempt: int, is_last: bool, sharded: bool) -> dict[str, Any]:
    """Train until a rank is killed; the last attempt trains to the end."""
    folder = Path(run_folder)
    os.fsync = lambda descriptor: None  # the test survives no reboot anyway
    run = ToyRun(folder / "run", seed=attempt, sharded=sharded)
    if attempt:
        run.resume()
    else:
        run.train(1, save=True)
    if not is_last:
        dice = random.Random(attempt)
        bad_rank, after_s = dice.randrange(2), dice.uniform(0, LONGEST_S)
        if run.accelerator.process_index == bad_rank:
            threading.Timer(after_s, die, [folder / f"killed-{attempt}"]).start()
        run.train(10**6, save=True)
    resumed_at = run.num_steps
    run.train(run.num_steps + STEPS_AT_THE_END, save=True)
    uninterrupted = ToyRun(folder / "uninterrupted", sharded=sharded)
    uninterrupted.train(run.num_steps)
    got, want = run.state(), uninterrupted.state()
    differing = sorted(name for name in got if got[name] != want[name])
    return {"resumed at": resumed_at, "differing": differing}


def die(note: Path) -> None:
    note.touch()
    os.kill(os.getpid(), signal.SIGKILL)
