"""The allocator's cache, given back after checkpoints."""

import gc
import logging
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_memopt.memory import Counters
from hf_memopt.memory.device_counters import counters_for
from hf_memopt.units import GIB

logger = logging.getLogger(__name__)


class ClearCacheOnSaveCallback(TrainerCallback):
    """After every saved checkpoint, collects garbage and returns unused device memory to the driver; logs how much.

    Saving gathers and copies tensors that nothing needs afterwards, and the blocks that the allocator keeps of them can
    be of no use for the sizes that training needs. This gives the whole cache back, for other processes too. It moves
    nothing that is in use, so it undoes no fragmentation inside of segments, and the next step has to ask the driver
    for its memory again: a synchronisation and some milliseconds per checkpoint.

    If memory is lost to fragmentation in every step (`memory/fragmentation_gib` of `MemoryLoggingCallback` grows), set
    `PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment instead: there the cause goes away.

    Args:
        counters: where to read reserved memory from; None, the device's own. On the CPU, which has none, there is no
            cache, and garbage is all that is collected.
    """

    def __init__(self, *, counters: Counters | None = None) -> None:
        self._counters = counters

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._counters is None:
            self._counters = counters_for(args.device)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        gc.collect()
        if self._counters is None:
            return
        before = self._counters.read().reserved_bytes
        torch.accelerator.empty_cache()
        freed_gib = (before - self._counters.read().reserved_bytes) / GIB
        logger.info("step %d: returned %.2f GiB of unused device memory", state.global_step, freed_gib)
