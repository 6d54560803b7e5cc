"""A thousand steps of mode "auto" without a budget, on a device with room only if everything is offloaded."""

from collections import deque
from contextlib import nullcontext

import pytest
import torch
from fake_cuda import device as fake_device
from nearly_full import nearly_full
from torch import Tensor, nn

from hf_memopt import ActivationOffloader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
NUM_STEPS = 1000
WIDTH, NUM_LAYERS = 64, 6
LARGEST_BATCH, LONGEST = 32, 1024  # 8 MiB in a tensor of this many tokens
LARGEST_TEMPORARY_BYTES = 2 * MIB
NUM_LOGGED = 3
SLACK = 1.1  # for fragmentation in the allocator, which differs from step to step


class Training:
    """Layers that save much and compute little, with other allocations and another size in each step."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH).to(device))
        self.layers = nn.Sequential(*(nn.LeakyReLU(0.9) for _ in range(NUM_LAYERS)))
        self.data = torch.randn(2 * LARGEST_BATCH * LONGEST, WIDTH, generator=torch.Generator().manual_seed(0))
        self.logged: deque[Tensor] = deque(maxlen=NUM_LOGGED)

    def step(self, lots: torch.Generator, offloader: ActivationOffloader | None, largest: bool = False) -> None:
        def up_to(most: int) -> int:
            drawn = int(torch.randint(1, 9 * most // 8 + 1, (), generator=lots))  # the largest at every ninth time
            return most if largest else min(drawn, most)

        batch, length, begin = up_to(LARGEST_BATCH), up_to(LONGEST), up_to(LARGEST_BATCH * LONGEST)
        x = self.data[begin:][: batch * length].view(batch, length, WIDTH).to(self.device)
        with offloader.offload_context(self.layers) if offloader else nullcontext():
            y = self.layers(x * self.weight)
            temporary = torch.ones(up_to(LARGEST_TEMPORARY_BYTES), dtype=torch.uint8, device=self.device)
            loss = nn.functional.mse_loss(y, x)
        del temporary
        loss.backward()
        with torch.no_grad():
            self.weight.add_(self.weight.grad, alpha=-0.1)
        self.weight.grad = None
        self.logged.append(y.detach()[0, : up_to(length)].clone())

    def train(self, num_steps: int, offloader: ActivationOffloader | None = None, largest: bool = False) -> Tensor:
        """Return the final weight, the same for the same number of steps."""
        lots = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            self.step(lots, offloader, largest)
        return self.weight.detach()


def make_offloader(**options: str) -> ActivationOffloader:
    return ActivationOffloader(offload_threshold_mb=0.1, prefetch_ahead=1, **options)


def room_for_everything_offloaded() -> int:
    training = Training()
    torch.cuda.reset_peak_memory_stats()
    training.train(3, make_offloader(mode="all"), largest=True)
    return int(SLACK * torch.cuda.max_memory_reserved())


def test_a_thousand_steps_where_only_everything_offloaded_fits() -> None:
    room_bytes = room_for_everything_offloaded()
    offloader = make_offloader()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with nearly_full(room_bytes - torch.cuda.memory_reserved()):
        found = Training().train(NUM_STEPS, offloader)
        with pytest.raises(torch.OutOfMemoryError):
            Training().train(NUM_STEPS)
    # A CPU computes the same bits as a fake GPU, in less time.
    plain = Training("cpu" if fake_device.is_loaded() else "cuda").train(NUM_STEPS)
    assert torch.equal(found.cpu(), plain.cpu())
    assert offloader.stats.bytes_moved > 0
    # Batches of hundreds of sizes share the host's blocks.
    assert offloader.stats.host_bytes_pinned < 4 * room_bytes
