"""The step to simulate, and its model's repeated layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_memopt.planning.accounting.repeated_layers import Layers


@dataclass(frozen=True)
class SimulatedStep:
    """The functions and counts that `estimate_peak_memory` needs to run a step.

    Attributes:
        setup: called with the device.
        step: called with the result of `setup`; runs `num_micro_batches` micro-batches and one update.
        num_steps: steps that show all: 2 for a lazy optimizer state, more where plans are made from recorded passes.
        num_micro_batches: in `step`.
        repeated: the model's equal layers, if it has any; None: all are simulated.
        num_gpus: processes that run it together, each with a device of its own.
        has_group: whether they belong to a process group, as several always do.
        assumptions: on which it rests, beside those of its simulation.
        notes: remarks on its options, for the answer.
        build: called before `setup`, where tensors still have memory.
        is_trainers_own: a run makes this very step, so that weights without a gradient have none there either.
    """

    setup: Callable[[Any], Any]
    step: Callable[[Any], Any]
    num_steps: int = 2
    num_micro_batches: int = 1
    repeated: "RepeatedLayers | None" = None
    num_gpus: int = 1
    has_group: bool = False
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_trainers_own: bool = False
    build: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RepeatedLayers:
    """Layers of which each repeats the one before it, and the same step of a model that has only so many of them."""

    layers: Layers
    step_with: Callable[[int], SimulatedStep]
