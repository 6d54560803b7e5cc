"""What the recipes' plans share: levers as changes of options, the batch, and the files that a plan writes."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from hf_memopt.estimate.gpus import CARDS, Card
from hf_memopt.memory.device_counters import counters_for
from hf_memopt.tuning import Row, plan
from hf_memopt.tuning.accelerate_config import write_accelerate_config
from hf_memopt.tuning.settings_table import explain, headline
from hf_memopt.tuning.workload import PASSES_OF_AUTO, SearchDimension, Settings, SimulatedStep, divisors

logger = logging.getLogger(__name__)

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
            *(SearchDimension(lever, tuple(values)) for lever, values in self.LEVERS.items()),
            SearchDimension(PRECISION, precisions),
        )

    @property
    def micro_batches(self) -> list[int]:
        """With each of which the update is the same."""
        return divisors(self.effective_batch)

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
        changes: dict[str, Any] = {"offload.compare": None, "offload.plan": None}
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


def applied(
    options: Any,
    accelerator: Accelerator,
    make_workload: Callable[[str], RecipeWorkload],
    make_accelerator: Callable[[Any], Accelerator],
) -> tuple[Any, Accelerator, Row | None]:
    """Options and accelerator as a plan for `--plan`'s card has them, and what the plan predicts; as they were without.

    The main process plans, all follow. Logs the choice and why.

    Args:
        options: of the recipe.
        accelerator: made from them.
        make_workload: from a precision.
        make_accelerator: from options.

    Raises:
        ValueError: on the main process: no settings fit, the card is unknown, or "auto" without an accelerator.
    """
    card = options.offload.plan
    if card is None:
        return options, accelerator, None
    precision = "no" if accelerator.mixed_precision == "no" else "bf16"  # fp16 takes as much memory
    workload = make_workload(precision)
    found: list[Any] = [None]
    if accelerator.is_main_process:
        result = plan(workload, gpu=card_of(accelerator.device) if card == "auto" else card)
        logger.info("Plan: %s", "\n  ".join([headline(result), *explain(result)]))
        found = [result.best]
    (best,) = broadcast_object_list(found)
    options = workload.with_settings(best.settings, best.micro_batch)
    return options, make_accelerator(options), best


def compare(predicted: Row | None, accelerator: Accelerator) -> None:
    """Log the predicted peak, if there was a plan, beside the measured one, where the device counts."""
    if predicted is None:
        return
    counters = counters_for(accelerator.device)
    text = f"Plan: predicted peak {predicted.estimate.peak_bytes / 2**30:.2f} GiB of tensors"
    if counters is not None:
        text += f", measured {counters.read().peak_allocated_bytes / 2**30:.2f} GiB"
    logger.info(text)


def card_of(device: torch.device) -> Card:
    """The card that this process computes on: its own memory, and the speed of the card of that name, if it is known.

    Raises:
        ValueError: `device` is no accelerator.
    """
    if device.type == "cpu":
        raise ValueError("plan='auto' needs an accelerator; name a card or a size, such as --plan 8GiB")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    squeezed = name.lower().replace(" ", "")
    known = [card for card in CARDS.values() if all(part in squeezed for part in card.name.split("-"))]
    card = max(known, key=lambda each: len(each.name), default=CARDS["rtx4070"])
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else card.compute_capability
    memory_bytes = torch.accelerator.get_memory_info(device)[1]
    return replace(card, name=name, memory_bytes=memory_bytes, compute_capability=capability)


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
