"""A comparison of the simulated first of several ranks with real processes on the CPU."""

import json
from pathlib import Path
from typing import Any

import torch
from late_imports import LateModule
from ranks import on_ranks

from hf_memopt.planning import estimate_peak_memory
from hf_memopt.planning.simulation.ranks.first_rank import BACKEND

rank_steps = LateModule("rank_steps")


def check_first_rank(folder: Path, num_ranks: int, ways: str, **environ: str) -> dict[str, set[str]]:
    """Compare bytes after an update and each phase's peak, in `rank_steps.<ways>`; return storages' purposes by way."""
    real, *others = on_ranks("distributed.engine_rank:outcomes", ways, num_ranks=num_ranks, **environ)
    seen, kinds = {}, {}
    for name, way in getattr(rank_steps, ways).items():
        seen[name], kinds[name] = simulated_rank(way, num_ranks, folder)
    assert seen == real, f"{seen} is not {real}"
    # Where a length cannot be divided, the last ranks have less.
    for rank in others:
        for name, other in rank.items():
            assert all(num_bytes <= real[name]["held"][what] for what, num_bytes in other["held"].items())
    return kinds


def simulated_rank(way: Any, num_ranks: int, folder: Path) -> tuple[dict[str, Any], set[str]]:
    held = folder / "held.json"

    def setup(device: torch.device) -> Any:
        return rank_steps.setup(way, device, BACKEND, lambda found: held.write_text(json.dumps(found)))

    estimate = estimate_peak_memory(setup, rank_steps.step, like="cpu", num_gpus=num_ranks)
    return {"held": json.loads(held.read_text()), "peaks": estimate.phases}, set(estimate.storage_kinds)
