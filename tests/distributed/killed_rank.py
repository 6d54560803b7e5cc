"""What each process of test_killed_ranks.py runs: `killed_rank.py <folder> <attempt> <is the last> <is sharded>`.

One rank of each attempt but the last is killed at a random moment, saving or not. What came of all of them goes to
`<folder>/rank<number>.json`.
"""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from alone import leave
from toy_run import ToyRun

LONGEST_S = 0.4  # until a rank is killed: some twenty checkpoints
STEPS_AT_THE_END = 3


def main() -> None:
    folder, attempt, is_last, sharded = Path(sys.argv[1]), *map(int, sys.argv[2:])
    os.fsync = lambda descriptor: None  # nothing here outlives a reboot
    run = ToyRun(folder / "run", seed=attempt, sharded=bool(sharded))
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
    uninterrupted = ToyRun(folder / "uninterrupted", sharded=bool(sharded))
    uninterrupted.train(run.num_steps)
    got, want = run.state(), uninterrupted.state()
    differing = sorted(name for name in got if got[name] != want[name])
    result = {"resumed at": resumed_at, "differing": differing}
    (folder / f"rank{run.accelerator.process_index}.json").write_text(json.dumps(result))


def die(note: Path) -> None:
    note.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
    leave()
