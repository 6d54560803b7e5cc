"""CUDA devices, real or fake, with little room."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fake_cuda import device as fake_device


@contextmanager
def nearly_full(room_bytes: int) -> Iterator[None]:
    """Leave room for so much more: others take the rest of a fake device, a limit of this process a real one's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if fake_device.is_loaded():
        fake_device.leave_free(room_bytes)
    else:
        total_bytes = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room_bytes) / total_bytes)
    try:
        yield
    finally:
        if fake_device.is_loaded():
            fake_device.give_back()
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)
