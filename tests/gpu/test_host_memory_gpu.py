"""Host memory of a GPU: registered while it is mapped, and as long as copies come or go."""

import gc

import pytest
import torch
from torch import nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer.host_memory import pinned_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = 2**20
SLEEP_CYCLES = 400_000_000  # 200 ms


def test_memory_is_unregistered_before_it_is_unmapped() -> None:
    for _ in range(4):
        assert pinned_empty(SIZE, torch.device("cuda")).is_pinned()  # an error that stayed behind fails what follows
        gc.collect()
    torch.zeros(1, device="cuda").normal_()


def test_an_offloader_that_is_dropped_waits_for_its_copies() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0)
    x = torch.randn(1024, 256, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    with offloader.offload_context(model):
        loss = model(x).square().mean()
    del loss, offloader
    gc.collect()
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda").normal_()
