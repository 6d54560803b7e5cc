"""The sections of flags that recipes share, and refusals before any work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_memopt.activations.offload_arguments import OffloadArguments
from hf_memopt.checkpoint import find_checkpoint
from hf_memopt.command_line import check_output_folder
from hf_memopt.recipes.common.flags import Count, CountOrZero, NotNegative, Schedule, Seed, check_card, explained, flag


@dataclass
class RunOptions:
    """Of a run with a schedule by updates; each recipe adds its own, and its own folder and learning rate."""

    output_dir: str
    learning_rate: NotNegative
    lr_scheduler_type: Schedule = flag("cosine", "one of transformers' schedules, stepped at every update")
    warmup_steps: CountOrZero = flag(0, "updates until the learning rate has reached its peak")
    checkpointing_steps: CountOrZero = flag(0, "updates between checkpoints; 0: only at SIGTERM and SIGINT")
    checkpoints_total_limit: Count = flag(2, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in --output_dir")
    seed: Seed = flag(0, "seed of weights, of random numbers in training, and of the order of the data")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


@dataclass
class OffloadOptions(OffloadArguments):
    """Adds the options of all recipes but reflow: plans, and micro-batches that are halved."""

    plan: str | None = flag(None, "simulate to choose micro-batch and memory flags, for 'auto' or a card such as 8GiB")
    auto_micro_batch: bool = flag(False, "if memory runs out, begin again with half the micro-batch and twice as many")


def check_offloading(offload: OffloadOptions, compared: Sequence[str], *, checkpointed: bool, remedy: str) -> None:
    """Refuse modes that find nothing to move, with the missing part's `remedy`, and a budget that no mode reads."""
    used = {offload.offload, *compared}
    if offload.budget_gib is not None and "auto" not in used:
        raise ValueError(f"budget_gib={offload.budget_gib} needs --offload auto, and offload={offload.offload!r}")
    if offload.plan is not None and compared:
        raise ValueError(f"plan={offload.plan!r} chooses a mode, but this compares several; leave --plan out")
    if "inputs" in used and not checkpointed:
        raise ValueError(f"offload='inputs' moves {remedy}")
    check_card(offload.plan)


def checkpoints_folder(folder: str) -> Path:
    return Path(folder) / "checkpoints"


def check_folder(folder: str, resumed: str | None, name: str = "output_dir") -> None:
    """Refuse, as `check_unused`, a folder that holds another run, and a checkpoint that is not there."""
    check_unused(folder, resumed, name)
    if resumed is not None:
        with explained(f"resume_from_checkpoint={resumed!r}"):
            find_checkpoint(checkpoints_folder(folder), resumed)


def check_unused(folder: str, resumed: str | None, name: str = "output_dir") -> None:
    """Refuse a folder that holds a run which is not to be resumed, or that cannot be written to."""
    output = Path(folder)
    check_output_folder(name, output)
    patterns = ("results.json", "checkpoints/latest", "checkpoint-*")
    used = [path.relative_to(output) for pattern in patterns for path in output.glob(pattern)]
    if used and resumed is None:
        section, dot, _ = name.rpartition(".")
        raise ValueError(
            f"{name}={folder!r} already holds {used[0]}; go on with --{section}{dot}resume_from_checkpoint latest, "
            "or name another folder"
        )
