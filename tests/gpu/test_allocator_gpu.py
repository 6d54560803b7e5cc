"""A comparison of the estimates' model of the caching allocator with the allocator itself."""

import random
from collections.abc import Callable

import pytest
import torch
from fake_cuda import device

from hf_memopt.planning.accounting.caching_allocator import MIB, CachingAllocator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_LOGS = 250  # of each kind
NUM_CHANGES, MOST_TENSORS = 200, 40
BOUNDARIES = [MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 20 * MIB, 512, 513]
KINDS: dict[str, Callable[[random.Random], int]] = {
    "mixed": lambda lots: int(2 ** lots.uniform(5, 24.5)),
    "large": lambda lots: lots.randint(MIB, 24 * MIB),
    "small": lambda lots: lots.randint(1, MIB),
    "boundaries": lambda lots: lots.choice(BOUNDARIES),
}


@pytest.mark.skipif(not device.is_loaded(), reason="drivers do not promise falling addresses")
@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_the_allocators(kind: str) -> None:
    """Compare to the byte."""
    different = {}
    with device.settings(poison=0):  # the allocated memory is never read
        for seed in range(NUM_LOGS):
            real, modelled = peaks_of_a_log(random.Random(f"{kind}/{seed}"), KINDS[kind])
            if real != modelled:
                different[seed] = (real, modelled)
    assert not different


def peaks_of_a_log(lots: random.Random, draw: Callable[[random.Random], int]) -> tuple[tuple[int, int], ...]:
    """Return the peaks of allocated and reserved bytes: the allocator's pair, and the model's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model, live, peak_bytes = CachingAllocator(), [], 0
    for _ in range(NUM_CHANGES):
        if live and (lots.random() < 0.48 or len(live) == MOST_TENSORS):
            tensor, block = live.pop(lots.randrange(len(live)))
            model.release(block)
            del tensor
        else:
            num_bytes = draw(lots)
            live.append((torch.empty(num_bytes, dtype=torch.uint8, device="cuda"), model.allocate(num_bytes)))
        peak_bytes = max(peak_bytes, model.allocated_bytes)
    real = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved
    return real, (peak_bytes, model.peak_reserved_bytes)
