"""The batches of a trainer's own data with which its memory is estimated: those around the largest."""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Trainer


@dataclass(frozen=True)
class TrainerWindow:
    """The batches of one update, on the host."""

    batches: list[Any]  # as many as the trainer accumulates, or fewer where it has no more
    num_seen: int  # how many batches were looked at
    is_all: bool  # whether the trainer has no others
    moves: bool  # whether its dataloader puts batches on the device, as accelerate's do

    def __str__(self) -> str:
        largest = max(self.batches, key=num_bytes)
        return ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in tensors_of(largest).items())


def largest_window(trainer: Trainer, num_batches: int) -> TrainerWindow:
    """Draw batches and return the consecutive ones that hold the largest.

    Changes the trainer and the state of random numbers, so it is for a process of its own.
    """
    args = trainer.args
    # A simulation's process may not have others, such as workers.
    args.dataloader_num_workers, args.dataloader_prefetch_factor = 0, None
    args.dataloader_persistent_workers = args.dataloader_pin_memory = False
    loader = trainer.get_train_dataloader()
    moves = getattr(loader, "device", None) is not None
    if moves:
        loader.device = None
    length = args.gradient_accumulation_steps
    newest: deque[Any] = deque(maxlen=length)
    kept: list[Any] = []
    largest = num_seen = 0
    remaining = iter(loader)
    for batch in itertools.islice(remaining, num_batches):
        num_seen += 1
        newest.append(batch)
        if num_bytes(batch) > largest or len(kept) < length:
            largest, kept = max(largest, num_bytes(batch)), list(newest)
    if not kept:
        raise ValueError("the trainer's dataloader has no batch; check train_dataset and per_device_train_batch_size")
    return TrainerWindow(kept, num_seen, is_all=next(remaining, None) is None, moves=moves)


def num_bytes(batch: Any) -> int:
    """Return the bytes of a batch's tensors; without any, the length of its longest sample, a text."""
    tensors = tensors_of(batch)
    if not tensors and isinstance(batch, list):
        return max((len(str(sample)) for sample in batch), default=0)
    return sum(tensor.nbytes for tensor in tensors.values())


def tensors_of(batch: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {name: batch}
    if isinstance(batch, list | tuple):
        batch = dict(enumerate(batch))
    found: dict[str, Tensor] = {}
    for key, value in batch.items() if isinstance(batch, Mapping) else ():
        found |= tensors_of(value, f"{name}.{key}" if name else str(key))
    return found
