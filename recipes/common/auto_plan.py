"""The common base of all recipes' plans, and training within the memory at hand: by a plan, or half the micro-batch."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from hf_memopt.memory.device_counters import counters_for
from hf_memopt.planning import Row, plan
from hf_memopt.planning.cards.gpus import DEFAULT_CARD, Card, card_named
from hf_memopt.planning.models.accelerate_config import write_accelerate_config
from hf_memopt.planning.search.table import explain, headline
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.workload import Lever, Settings, Workload, divisors, num_steps
from hf_memopt.planning.workloads.model_levers import ACTIVATIONS
from hf_memopt.recipes.common.flags import write_options
from hf_memopt.recipes.common.options import checkpoints_folder
from hf_memopt.recipes.common.shipped_configs import config_file
from hf_memopt.units import format_gib

logger = logging.getLogger(__name__)

PRECISION = "mixed_precision"
PRECISIONS = ("no", "bf16")

WAYS = ("on the device", "offloaded where free", "checkpointed", "checkpointed, inputs offloaded")
Changes = Mapping[str, Any]  # "section.field" of the options, and its value


def reading(config: str | Path) -> list[str]:
    """Return the flags with which a recipe reads a file, or the shipped one that the path names."""
    return ["--config_path", str(config_file("config", Path(config)))]


class RecipeWorkload(ABC):
    """A recipe's own step on fake tensors, with options that depend on levers.

    `precision` is "no", "bf16", or "auto" to try both; `effective_batch` counts samples per update, None as `options`
    say.
    """

    # Each lever's values and the options that they change, from the fastest to the most frugal.
    LEVERS: ClassVar[Mapping[str, Mapping[str, Changes]]]
    # The script that `accelerate launch` runs, and the name of the file that it is given.
    MODULE: ClassVar[str]
    # The options that hold the samples of a micro-batch and the micro-batches of an update.
    BATCH: ClassVar[tuple[str, str]]
    # The option that names the checkpoint to go on from.
    RESUMED: ClassVar[str] = "training.resume_from_checkpoint"

    tokens_per_sample: int | None = None
    packages: Sequence[str] = ()

    def __init__(self, name: str, options: Any, precision: str, effective_batch: int | None) -> None:
        if effective_batch is None:
            effective_batch = self.given_batch(options)
        if precision not in (*PRECISIONS, "auto"):
            raise ValueError(f"precision={precision!r} is unknown; choose from {', '.join(PRECISIONS)}, auto")
        if effective_batch < 1:
            raise ValueError(f"effective_batch={effective_batch} must be at least 1")
        self.name, self.options, self.effective_batch = name, options, effective_batch
        precisions = PRECISIONS if precision == "auto" else (precision,)
        self.levers = (*(Lever.of(name, ways) for name, ways in self.LEVERS.items()), Lever(PRECISION, precisions))

    @property
    def micro_batches(self) -> list[int]:
        """Return the sizes with each of which the update is the same."""
        return divisors(self.effective_batch)

    def simulated(self, settings: Settings, micro_batch: int) -> SimulatedStep:
        options = self.with_settings(settings, micro_batch)
        num_micro_batches = self.num_simulated(options, self.effective_batch // micro_batch)
        return SimulatedStep(
            setup=lambda device: self.setup(options, settings[PRECISION]),
            step=self.step,
            num_steps=self.num_steps(options, num_micro_batches),
            num_micro_batches=num_micro_batches,
        )

    def with_settings(self, settings: Settings, micro_batch: int) -> Any:
        changes: dict[str, Any] = {"offload.plan": None}
        for lever, values in self.LEVERS.items():
            changes |= values[settings[lever]]
        return with_changes(self.options, changes | dict(self.batching(micro_batch)))

    def write(self, settings: Settings, micro_batch: int, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        written = self.write_options(self.with_settings(settings, micro_batch), folder)
        return [written, write_accelerate_config(folder / "accelerate.yaml", settings[PRECISION])]

    def command(self, written: list[Path]) -> str:
        options, config = written
        return f"accelerate launch --config_file {config} -m {self.MODULE} --config_path {options}"

    def num_steps(self, options: Any, num_micro_batches: int) -> int:
        """Return how many updates are simulated, until one finds memory as all later ones do."""
        return num_steps(options.offload.offload, num_micro_batches)

    def num_simulated(self, options: Any, accumulation: int) -> int:
        """Return how many micro-batches the simulated update runs: the third finds memory as the second did."""
        return min(2, accumulation)

    def write_options(self, options: Any, folder: Path) -> Path:
        return write_options(folder / f"{self.MODULE.rpartition('train_')[2]}.yaml", options)

    def given_batch(self, options: Any) -> int:
        micro_batch, accumulation = attrgetter(*self.BATCH)(options)
        return int(micro_batch * accumulation)

    def given_micro_batch(self, options: Any) -> int:
        return int(attrgetter(self.BATCH[0])(options))

    def batching(self, micro_batch: int) -> Changes:
        return dict(zip(self.BATCH, (micro_batch, self.effective_batch // micro_batch), strict=True))

    @abstractmethod
    def setup(self, options: Any, precision: str) -> Any:
        """Return the arguments of `step`, on the device of an `Accelerator` made here."""

    @abstractmethod
    def step(self, state: Any) -> object:
        """Make one update, as the recipe does it."""


class BatchInParts(RecipeWorkload):
    """A workload whose batch lies on the device as a whole and is computed in parts, as `--micro_batch_size` says."""

    def given_batch(self, options: Any) -> int:
        return int(options.training.batch_size)

    def given_micro_batch(self, options: Any) -> int:
        return int(options.training.micro_batch_size or options.training.batch_size)

    def batching(self, micro_batch: int) -> Changes:
        parts = 0 if micro_batch == self.effective_batch else micro_batch
        return {"training.batch_size": self.effective_batch, "training.micro_batch_size": parts}

    def num_simulated(self, options: Any, accumulation: int) -> int:
        """Return all of them, since they are parts of one batch."""
        return accumulation


def activation_levers(checkpointing: str, names: Sequence[str] = WAYS) -> dict[str, Changes]:
    """Return ways with saved activations by name; the option `checkpointing` has a model's blocks computed again."""
    ways = {name: ACTIVATIONS[name] for name in names}
    return {name: {checkpointing: how == "full", "offload.offload": mode} for name, (how, mode) in ways.items()}


def best_row(workload: Workload, card: str, state: Accelerator | PartialState) -> Row:
    """Return the plan's choice for a card, "auto" for the process's own. The main process plans, all follow."""
    # Each process would find the same, but planning takes seconds and all cores.
    found: list[Any] = [None]
    if state.is_main_process:
        result = plan(workload, gpu=card_of(state.device) if card == "auto" else card)
        logger.info("Plan: %s", "\n  ".join([headline(result), *explain(result)]))
        found = [result.best]
    best: Row = broadcast_object_list(found)[0]
    return best


def train_within_memory[R](
    options: Any,
    accelerator: Accelerator,
    make_workload: Callable[[str], RecipeWorkload],
    make_accelerator: Callable[[Any], Accelerator],
    train: Callable[[Accelerator, Any], R],
) -> R:
    """Train, with `--plan` after choosing micro-batch and memory flags by simulation.

    With `--auto_micro_batch` begin again, where memory runs out, with micro-batches of half the size or less. An update
    stays the same. The run goes on from its newest checkpoint, if it has one. Not for several processes: the others
    would wait for the one that has run out.
    """
    if options.offload.auto_micro_batch and accelerator.num_processes > 1:
        raise ValueError(
            f"auto_micro_batch=True is for one process, and there are {accelerator.num_processes}; use --plan auto, "
            "which finds the micro-batch beforehand"
        )
    # fp16 takes as much memory as bf16.
    workload, predicted = make_workload("no" if accelerator.mixed_precision == "no" else "bf16"), None
    if options.offload.plan is not None:
        predicted = best_row(workload, options.offload.plan, accelerator)
        options = workload.with_settings(predicted.settings, predicted.micro_batch)
        accelerator = make_accelerator(options)
    while True:
        try:
            trained = train(accelerator, options)
            log_prediction(predicted, accelerator)
            return trained
        except torch.OutOfMemoryError:
            size = workload.given_micro_batch(options)
            smaller = [each for each in workload.micro_batches if 2 * each <= size]
            if not options.offload.auto_micro_batch or not smaller:
                raise
        # Only here, where the error and the frames that it holds are gone, does memory come back.
        logger.warning(f"Out of memory with micro-batches of {size}; beginning again with {max(smaller)}, more of them")
        accelerator.free_memory()
        has_checkpoint = (checkpoints_folder(options.output_dir) / "latest").exists()
        resuming = {workload.RESUMED: "latest"} if has_checkpoint else {}
        options = with_changes(options, {**workload.batching(max(smaller)), **resuming})
        accelerator = make_accelerator(options)


def log_prediction(predicted: Row | None, accelerator: Accelerator) -> None:
    if predicted is None:
        return
    counters = counters_for(accelerator.device)
    text = f"Plan: predicted peak {format_gib(predicted.estimate.peak_bytes)} of tensors"
    if counters is not None:
        text += f", measured {format_gib(counters.read().peak_allocated_bytes)}"
    logger.info(text)


def card_of(device: torch.device) -> Card:
    """Return this process's card: its own memory, and the speed of a known card of that name."""
    if device.type == "cpu":
        raise ValueError("plan='auto' needs an accelerator; name a card or a size, such as --plan 8GiB")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    card = card_named(name) or DEFAULT_CARD
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else card.compute_capability
    memory_bytes = torch.accelerator.get_memory_info(device)[1]
    return replace(card, name=name, memory_bytes=memory_bytes, compute_capability=capability)


def with_changes(options: Any, changes: Changes) -> Any:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    return options._replace(**{name: replace(getattr(options, name), **values) for name, values in sections.items()})
