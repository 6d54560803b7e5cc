"""Workloads: training steps that depend on settings, and can be planned."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from hf_memopt.planning.simulated_step import SimulatedStep

Settings = Mapping[str, Any]

# Weights stay on the device, and do not visit it from one of the homes of `StreamedWeights`.
OFF = "off"
PLACES = {OFF: "on the device", "host": "on the host", "file": "in a file"}
# Of streamed weights: one learns the order of visits, one follows it, and one repeats that.
_PASSES_OF_STREAMS = 3
# Until an offloader's plan has settled: two passes are recorded, one is plain, one planned, and one repeats it.
PASSES_OF_AUTO = 5


def check_accumulation(asked: int | None, passes: int, effective_batch: int, micro_batch: int) -> None:
    """Raise ValueError if other forward passes are asked for than an update has."""
    if asked not in (None, passes):
        raise ValueError(
            f"accumulation={asked}: effective_batch={effective_batch} has {passes} passes of "
            f"batch_size={micro_batch}; leave one of them out"
        )


def num_steps(offload: str, num_micro_batches: int, base: str = OFF) -> int:
    """Return how many steps show everything: an optimizer's state, and plans that have settled.

    The first step may have one micro-batch alone.
    """
    passes = max(PASSES_OF_AUTO if offload == "auto" else 0, _PASSES_OF_STREAMS if base != OFF else 0)
    return max(2, 1 + math.ceil((passes - 1) / num_micro_batches))


@dataclass(frozen=True)
class Lever:
    """One setting that trades time for memory.

    Attributes:
        name: as the user sets it, such as a flag of the recipe.
        values: from the fastest to the most frugal; the first changes nothing.
        of_disk: the values that need a disk, and are tried where there is one.
        adaptive: values that use the room there is, each with the most frugal one that it may become.
    """

    name: str
    values: tuple[Any, ...]
    of_disk: tuple[Any, ...] = ()
    adaptive: Mapping[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, ways: Mapping[str, Mapping[str, Any]], adaptive: Mapping[str, str] | None = None) -> Self:
        """Make a lever from the options that each of its values changes; those that move bytes to a disk need one."""
        of_disk = [value for value, changes in ways.items() if not {"file", "nvme"}.isdisjoint(changes.values())]
        return cls(name, tuple(ways), tuple(of_disk), adaptive or {})

    def without_disk(self) -> "Lever":
        return replace(self, values=tuple(value for value in self.values if value not in self.of_disk))


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


class Workload(Protocol):
    """A recipe with its configuration, or a model with a batch.

    Attributes:
        name: for headings.
        levers: all but the micro-batch.
        effective_batch: samples per update.
        micro_batches: sizes of a forward pass, ascending; divisors of `effective_batch` with the same gradient.
        tokens_per_sample: None where samples are not made of tokens.
        packages: for pip, which the command needs and hf_memopt does not require.
    """

    @property
    def name(self) -> str: ...

    @property
    def levers(self) -> Sequence[Lever]: ...

    @property
    def effective_batch(self) -> int: ...

    @property
    def micro_batches(self) -> Sequence[int]: ...

    @property
    def tokens_per_sample(self) -> int | None: ...

    @property
    def packages(self) -> Sequence[str]: ...

    def simulated(self, settings: Settings, micro_batch: int) -> SimulatedStep:
        """Return the step with these settings, with as many micro-batches as the update has, but no more than 2.

        A third micro-batch finds memory as the second did.
        """

    def write(self, settings: Settings, micro_batch: int, folder: Path) -> list[Path]:
        """Write the configuration files that a run with these settings needs."""

    def command(self, written: list[Path]) -> str:
        """Return the command that starts a run with the files that `write` wrote."""
