"""What each process of tests/estimate/simulation/test_first_rank.py runs: `engine_rank.py <folder>`.

Trains a small Llama in each way of `rank_steps`, and leaves what it held in `<folder>/rank<number>.json`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from alone import leave
from rank_steps import WAYS, Way, setup, step
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimate.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.estimate.accounting.categories import StepLabels
from hf_memopt.estimate.simulation.first_rank import meshes_with_values, unseen_shape_propagation

CPU = torch.device("cpu")


@contextmanager
def gloo_on_copies() -> Iterator[None]:
    """Keep what is counted from gloo's threads, which let go of a tensor some moment after its collective."""

    def on_copies(collective: Callable[..., Any]) -> Callable[..., None]:
        def run(output: Tensor, input: Tensor, **options: Any) -> None:
            with _disable_current_modes():
                copy = output.clone()
                collective(copy, input.clone(), **options)
                output.copy_(copy)

        return run

    with (
        patch.object(distributed, "all_gather_into_tensor", on_copies(distributed.all_gather_into_tensor)),
        patch.object(distributed, "reduce_scatter_tensor", on_copies(distributed.reduce_scatter_tensor)),
    ):
        yield


def observed(way: Way) -> dict[str, Any]:
    """What the rank holds after an update, and the most in each phase of two real steps."""
    held: list[dict[str, int]] = []
    phases = StepPhases()
    log = AllocationLog("cpu", 1, phases)
    labels = StepLabels(log, phases)
    with (
        log,
        log.following_resizes(),
        labels.following(),
        meshes_with_values(),
        unseen_shape_propagation(),
        gloo_on_copies(),
    ):
        state = setup(way, CPU, "gloo", held.append)
        labels.add_state(state)
        for _ in range(2):
            log.history.step_begins.append(log.history.position)
            phases.begin_step()
            step(state)
    return {"held": held[-1], "peaks": log.closed().trace().peaks_by_phase()}


def main() -> None:
    distributed.init_process_group("gloo")
    seen = {name: observed(way) for name, way in WAYS.items()}
    Path(sys.argv[1], f"rank{distributed.get_rank()}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
