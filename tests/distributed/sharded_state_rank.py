"""What each process of test_sharded_state.py runs: `sharded_state_rank.py <folder>`, in two, four and one processes.

Two save in the middle of a run sharded by FSDP2 and resume; four and one try to. What came of it on each rank goes to
`<folder>/rank<number>_of_<processes>.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from accelerate.utils import load_fsdp_model
from alone import leave
from torch import distributed
from toy_run import ToyRun


def resumed(folder: Path) -> dict[str, Any]:
    whole = ToyRun(folder / "whole", sharded=True)
    whole.train()
    ToyRun(folder / "run", keep_last=9, sharded=True).train(3, save=True)
    run = ToyRun(folder / "run", keep_last=9, seed=1, sharded=True)
    run.resume()
    found = {"at": run.num_steps, "weights": weights(run)}
    run.train(save=True)
    ours, theirs = run.state(), whole.state()
    return {**found, "differing": [name for name in ours if ours[name] != theirs[name]]}


def elsewhere(folder: Path) -> dict[str, Any]:
    run = ToyRun(folder / "run", seed=2, sharded=True)
    try:
        run.resume("step-000003")
        message = "went on"
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    plugin = run.accelerator.state.fsdp_plugin
    load_fsdp_model(plugin, run.accelerator, run.model, str(folder / "run" / "step-000003"))
    return {"message": message, "weights": weights(run)}


def weights(run: ToyRun) -> dict[str, Any]:
    return {name: value for name, value in run.state().items() if name.startswith("model.")}


def main() -> None:
    folder = Path(sys.argv[1])
    saved = folder / "run" / "step-000003"
    result = elsewhere(folder) if saved.exists() else resumed(folder)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    (folder / f"rank{rank}_of_{num_ranks}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    leave()
