"""What each process of test_engine_ranks.py runs: `engine_rank.py <folder>`.

Trains a small Llama in each way of `rank_steps`, and leaves what it held in `<folder>/rank<number>of<number>.json`.
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
from rank_steps import WAYS, Way, held_bytes, setup, step
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimate.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.estimate.accounting.categories import StepLabels
from hf_memopt.estimate.simulation.ranks import meshes_with_values, unseen_shape_propagation

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


def peaks(way: Way) -> dict[str, int]:
    """The most in each phase of two real steps."""
    phases = StepPhases()
    log = AllocationLog("cpu", 1, phases)
    labels = StepLabels(log, phases)
    unseen = meshes_with_values(), unseen_shape_propagation(), gloo_on_copies()
    with log, log.following_resizes(), labels.following(), unseen[0], unseen[1], unseen[2]:
        state = setup(way, CPU, "gloo")
        labels.add_state(state)
        for _ in range(2):
            log.history.step_begins.append(log.history.position)
            phases.begin_step()
            step(state)
    return log.closed().trace().peaks_by_phase()


def main() -> None:
    distributed.init_process_group("gloo")
    seen: dict[str, Any] = {
        name: {"held": held_bytes(setup(way, CPU, "gloo")), "peaks": peaks(way)} for name, way in WAYS.items()
    }
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    Path(sys.argv[1], f"rank{rank}of{num_ranks}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
