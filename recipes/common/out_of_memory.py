"""Trains within the memory at hand: by a plan, with half the micro-batch, or with an error that names what helps."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_memopt.memory import explain_oom
from hf_memopt.memory.oom import CHECKPOINTING, HALF_MICRO_BATCH, OFFLOADING
from hf_memopt.recipes.common.auto_plan import RecipeWorkload, best_row, log_prediction, with_changes
from hf_memopt.recipes.common.options import OffloadOptions, checkpoints_folder

logger = logging.getLogger(__name__)


def explained(
    model: nn.Module,
    folder: str | Path,
    offload: OffloadOptions,
    checkpointing: str,
    halving: str = "--auto_micro_batch",
) -> AbstractContextManager[None]:
    """Return a context that adds a report to an OutOfMemoryError: the holders of the memory, and the flags that help.

    `checkpointing` are the flags that switch it on, empty where it is on; `halving` those that halve the micro-batch.
    """
    flags = {HALF_MICRO_BATCH: f"{halving}: the same update in more forward passes"}
    if offload.offload == "off":
        flags[OFFLOADING] = "--offload auto: the same gradients, copies over the host link"
    elif offload.offload == "auto":
        flags[OFFLOADING] = "--offload all, or a smaller --budget_gib: moves what --offload auto has kept"
    if checkpointing:
        flags[CHECKPOINTING] = f"{checkpointing}: forward is computed again; with --offload inputs its inputs move too"
    return explain_oom(model, output_dir=folder, flags=flags)


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
