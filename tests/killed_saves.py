"""Kills processes that save checkpoints: `killed_saves.py <folder> <how many> <of these in the middle> <seed>`.

Prints the outcomes as JSON. Kills go on until enough of them have hit a save: a busy machine delays both sides. All
processes are forks of this one, so that imports are paid for once. Other processes may write only so many bytes to a
file, which is a full disk as far as all libraries are concerned.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from toy_run import ToyRun

TOO_MANY_STEPS = 10**6


def main() -> None:
    os.fsync = lambda descriptor: None  # a killed process's writes are there without it, and sooner
    folder, num_kills, num_wanted, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    dice = random.Random(seed)
    num_loaded = num_in_the_middle = num_lost = 0
    ToyRun(folder).train(1, save=True)
    while num_loaded < num_kills or (num_loaded < 20 * num_kills and num_in_the_middle < num_wanted):
        num_saved = kill_one(folder, dice)
        num_in_the_middle += unfinished(folder)
        num_steps, state = resumed(folder)
        num_loaded += 1
        num_lost += num_steps < num_saved
    killed = {
        "num_loaded": num_loaded,
        "num_in_the_middle": num_in_the_middle,
        "num_lost": num_lost,
        "state_is_that_of_an_uninterrupted_run": state == expected(folder, num_steps),
    }
    print(json.dumps({**killed, **limit_files(folder)}))


def resumed(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return steps and state of `latest`, and leave the folder free for the next process."""
    run = ToyRun(folder, seed=1)
    run.resume()
    return run.num_steps, run.state()


def kill_one(folder: Path, dice: random.Random) -> int:
    """Return the last step that the killed process knew to be saved."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        train_on(folder, writer)
    os.close(writer)
    with os.fdopen(reader) as saved:
        steps = [saved.readline()]
        time.sleep(dice.uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        steps += [line for line in saved if line.endswith("\n")]
    return int(steps[-1])


def train_on(folder: Path, writer: int) -> NoReturn:
    run = ToyRun(folder)
    run.resume()
    while run.num_steps < TOO_MANY_STEPS:
        os.write(writer, f"{run.num_steps}\n".encode())
        run.train(run.num_steps + 1, save=True)
    os._exit(1)


def unfinished(folder: Path) -> bool:
    """Return whether a save or a removal was under way."""
    names = {path.name for path in folder.iterdir()} - {".lock"}
    newest = max(name for name in names if name.startswith("step-"))
    return any("." in name for name in names) or not (folder / "latest").read_text().startswith(newest)


def expected(folder: Path, num_steps: int) -> dict[str, Any]:
    run = ToyRun(folder.with_name("uninterrupted"))
    run.train(num_steps)
    return run.state()


def limit_files(folder: Path) -> dict[str, Any]:
    """Save with no file larger than so many bytes; the largest has about 15,000."""
    errors = []
    for limit_bytes in (0, 1, 50, 100, 300, 1000, 2000, 5000, 10_000):
        shutil.rmtree(folder)
        ToyRun(folder).train(2, save=True)
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            save_within(limit_bytes, folder, writer)
        os.waitpid(process, 0)
        os.close(writer)
        errors.append(os.read(reader, 1000).decode())
        os.close(reader)
        assert resumed(folder)[0] == 2
    run = ToyRun(folder)
    run.resume()
    run.train(4, save=True)
    same = run.state() == expected(folder, 4)
    return {"errors": errors, "state_after_errors_is_that_of_an_uninterrupted_run": same}


def save_within(limit_bytes: int, folder: Path, writer: int) -> NoReturn:
    run = ToyRun(folder)
    run.resume()
    run.train(3)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    try:
        run.save()
    except Exception as error:
        os.write(writer, f"{type(error).__name__}: {error}"[:1000].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
