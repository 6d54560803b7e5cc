"""Checkpoints of a run that FSDP2 shards, for test_sharded_state.py."""

from pathlib import Path
from typing import Any

from accelerate.utils import load_fsdp_model
from toy_run import ToyRun


def resumed(run_folder: str) -> dict[str, Any]:
    """Save in mid-run, resume, and train to the end."""
    folder = Path(run_folder)
    whole = ToyRun(folder / "whole", sharded=True)
    whole.train()
    ToyRun(folder / "run", keep_last=9, sharded=True).train(3, save=True)
    run = ToyRun(folder / "run", keep_last=9, seed=1, sharded=True)
    run.resume()
    found = {"at": run.num_steps, "weights": weights(run)}
    run.train(save=True)
    ours, theirs = run.state(), whole.state()
    return {**found, "differing": [name for name in ours if ours[name] != theirs[name]]}


def elsewhere(run_folder: str) -> dict[str, Any]:
    """Try to resume in another number of processes, then read weights alone."""
    folder = Path(run_folder)
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
