"""What the recipes' plans share: levers as changes of options, the batch, and the files that a plan writes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from hf_memopt.planning.workload import Lever, Settings, SimulatedStep

# Passes until an offloader's plan has settled: two are recorded, the third is planned, the fourth repeats it.
PASSES_OF_AUTO = 4
PRECISION = "mixed_precision"
PRECISIONS = ("no", "bf16")

Changes = Mapping[str, Any]  # "section.field" of the options, and its value


class RecipeWorkload(ABC):
    """A recipe's own step on fake tensors, with options that depend on levers.

    Args:
        name: for headings.
        options: of the recipe, in sections.
        effective_batch: samples per update.
        precision: "no", "bf16", or "auto" to try both.

    Raises:
        ValueError: `precision` is unknown, or `effective_batch` not positive.
    """

    # Each lever's values and what they change, from the fastest to the most frugal.
    LEVERS: ClassVar[Mapping[str, Mapping[str, Changes]]]
    # What `accelerate launch` runs, and the name of the file that it is given.
    MODULE: ClassVar[str]

    def __init__(self, name: str, options: Any, effective_batch: int, precision: str) -> None:
        if precision not in (*PRECISIONS, "auto"):
            raise ValueError(f"precision={precision!r} is unknown; choose from {', '.join(PRECISIONS)}, auto")
        if effective_batch < 1:
            raise ValueError(f"effective_batch={effective_batch} must be at least 1")
        self.name, self.options, self.effective_batch = name, options, effective_batch
        precisions = PRECISIONS if precision == "auto" else (precision,)
        self.levers = (
            *(Lever(lever, tuple(values)) for lever, values in self.LEVERS.items()),
            Lever(PRECISION, precisions),
        )

    def simulated(self, settings: Settings, micro_batch: int) -> SimulatedStep:
        options = self.with_settings(settings, micro_batch)
        return SimulatedStep(
            setup=lambda device: self.setup(options, settings[PRECISION]),
            step=self.step,
            num_steps=PASSES_OF_AUTO if options.offload.offload == "auto" else 2,
            num_micro_batches=self.num_simulated(options, self.effective_batch // micro_batch),
        )

    def with_settings(self, settings: Settings, micro_batch: int) -> Any:
        """The options of a candidate."""
        changes: dict[str, Any] = {"offload.compare": None}
        for lever, values in self.LEVERS.items():
            changes |= values[settings[lever]]
        return changed(self.options, changes | dict(self.batching(micro_batch)))

    def write(self, settings: Settings, micro_batch: int, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        options = self.with_settings(settings, micro_batch)
        written = self.write_options(options, folder)
        return [written, write_accelerate_config(folder / "accelerate.yaml", settings[PRECISION])]

    def command(self, written: list[Path]) -> str:
        """What runs the recipe with the files that `write` wrote."""
        options, config = written
        return f"accelerate launch --config_file {config} -m {self.MODULE} @{options}"

    def num_simulated(self, options: Any, accumulation: int) -> int:
        """How many micro-batches the simulated update runs: the third finds memory as the second did."""
        return min(2, accumulation)

    def write_options(self, options: Any, folder: Path) -> Path:
        """The options' file."""
        return write_args(folder / f"{self.MODULE.rpartition('train_')[2]}.args", options)

    @abstractmethod
    def batching(self, micro_batch: int) -> Changes:
        """What makes an update of `effective_batch` samples out of such micro-batches."""

    @abstractmethod
    def setup(self, options: Any, precision: str) -> Any:
        """What `step` needs, on the device of an `Accelerator` made here."""

    @abstractmethod
    def step(self, state: Any) -> object:
        """One update, as the recipe does it."""


def changed(options: Any, changes: Changes) -> Any:
    """Options, a named tuple of dataclasses, with other values in some fields."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    return options._replace(**{name: replace(getattr(options, name), **values) for name, values in sections.items()})


def write_args(path: Path, options: Any) -> Path:
    """The flags that differ from their defaults, one per line, for `@FILE`."""
    lines = []
    for section in options:
        default = type(section)()
        for field in fields(section):
            value = getattr(section, field.name)
            if value != getattr(default, field.name):
                lines += _flag(field.name, value)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _flag(name: str, value: Any) -> list[str]:
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


def write_accelerate_config(path: Path, mixed_precision: str) -> Path:
    """For `accelerate launch --config_file`: one process on one GPU."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": False,
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
