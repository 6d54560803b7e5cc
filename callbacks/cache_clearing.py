"""The allocator's cache, given back after checkpoints."""

import gc
import logging
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.memory import Counters
from hf_memopt.memory.device_counters import counters_for
from hf_memopt.units import GIB

logger = logging.getLogger(__name__)


class ClearCacheOnSaveCallback(TrainerCallback):
    """After every saved checkpoint, collects garbage and returns unused device memory to the driver; logs how much.

    The blocks of saved copies can be of no use for the sizes that training needs. The next step asks the driver anew: a
    synchronisation and some milliseconds. Fragmentation inside of segments stays: if `memory/fragmentation_gib` of
    `MemoryLoggingCallback` grows in every step, set `PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment
    instead.

    Args:
        counters: where to read reserved memory from; None, the device's own. On the CPU only garbage is collected.
    """

    def __init__(self, *, counters: Counters | None = None) -> None:
        self._counters = counters

    def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        if self._counters is None:
            self._counters = counters_for(args.device)

    def on_save(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        gc.collect()
        if self._counters is None:
            return
        before = self._counters.read().reserved_bytes
        torch.accelerator.empty_cache()
        freed_gib = (before - self._counters.read().reserved_bytes) / GIB
        logger.info("step %d: returned %.2f GiB of unused device memory", state.global_step, freed_gib)
