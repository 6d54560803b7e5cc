"""Real steps of one rank, for the tests of the simulated first rank."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import rank_steps
import torch
from collective_names import ALL_GATHERS, REDUCE_SCATTERS
from rank_steps import Way, setup, step
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_memopt.planning.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.planning.accounting.categories import StepLabels
from hf_memopt.planning.cards.gpus import DEFAULT_CARD
from hf_memopt.planning.simulation.ranks.first_rank import meshes_with_values, unseen_shape_propagation
from hf_memopt.planning.simulation.virtual_time import VirtualClock, VirtualEvent

CPU = torch.device("cpu")


@contextmanager
def gloo_on_copies() -> Iterator[None]:
    """Give gloo copies of tensors, since its threads drop a tensor a moment after its collective."""

    def on_copies(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Tensor, **options: Any) -> Any:
            tensors += tuple(options.pop(name) for name in _TENSORS if name in options)
            done = options.pop("async_op", False)
            with _disable_current_modes():
                copies = [tensor.clone() for tensor in tensors]
                collective(*copies, **options)
                tensors[0].copy_(copies[0])
            return _Done() if done else None

        return run

    with ExitStack() as stack:
        for name in (*ALL_GATHERS, *REDUCE_SCATTERS, "all_reduce", "reduce", "broadcast"):
            stack.enter_context(patch.object(distributed, name, on_copies(getattr(distributed, name))))
        stack.enter_context(_NoOther())
        yield


# Argument names of collectives' tensors, results first.
_TENSORS = ("output_tensor", "output", "input_tensor", "input", "tensor")


class _Done:
    def wait(self) -> None: ...


class _NoOther(TorchDispatchMode):
    """Fails if FSDP2 gathers or reduces by a name that is not in `collective_names`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exchanges = ("c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default")
        assert str(function) not in exchanges, f"{function} was called by a name that collective_names lacks"
        return function(*args, **kwargs or {})


@contextmanager
def as_simulated(labels: StepLabels) -> Iterator[None]:
    from hf_memopt.planning.simulation.ranks.zero_engine import updates_labelled, zero_as_on_cuda

    # DeepSpeed gets virtual streams, which have to know a time.
    clock = VirtualClock(DEFAULT_CARD, "cpu")
    with zero_as_on_cuda(CPU), updates_labelled(labels), patch.object(VirtualEvent, "clock", clock, create=True):
        yield


def observed(way: Way) -> dict[str, Any]:
    """Return held bytes after an update, and each phase's peak in two real steps."""
    held: list[dict[str, int]] = []
    phases = StepPhases()
    log = AllocationLog("cpu", 1, phases)
    labels = StepLabels(log)
    with (
        as_simulated(labels) if way.zero else nullcontext(),
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


def outcomes(ways: str) -> dict[str, Any]:
    """Train a small Llama in each of `rank_steps.<ways>`, and return held bytes by way."""
    distributed.init_process_group("gloo")
    return {name: observed(way) for name, way in getattr(rank_steps, ways).items()}
