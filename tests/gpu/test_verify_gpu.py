"""`verify` on a GPU: the device's memory, generators and tensors, and a copy that is not awaited."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")


def model_and_batch() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers).to(DEVICE), torch.randn(512, 256, device=DEVICE)


def test_offloading_and_checkpointing_are_equal_and_take_less_of_the_device() -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0)

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def offloaded() -> None:
        with offloader.offload_context(model):
            loss = model(batch).square().mean()
        update(loss)

    state = torch.cuda.get_rng_state()
    for switched in (
        offloaded,
        lambda: update(checkpoint(model, batch, use_reentrant=False).square().mean()),
    ):
        report = verify(lambda: update(model(batch).square().mean()), switched)
        assert report.equal, report
        peaks = {run.name: run.peak_bytes for run in report.runs}
        assert 0 < (peaks["switched"] or 0) < (peaks["plain"] or 0)
    assert offloader.stats.bytes_moved > 0
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_copy_that_comes_back_wrong_is_found() -> None:
    model, batch = model_and_batch()

    def offloaded() -> None:
        # What a copy is that has not arrived: memory that holds something else.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: torch.full_like(saved, 0.25)):
            loss = model(batch).square().mean()
        loss.backward()

    report = verify(lambda: model(batch).square().mean().backward(), offloaded, steps=1)
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.place.phase == "gradient"
    assert report.losses_equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_the_device_is_the_precision_of_the_yardstick(dtype: torch.dtype) -> None:
    model, batch = model_and_batch()
    model.eval()

    def step(factor: float, parts: int = 1) -> None:
        with torch.autocast("cuda", dtype):
            losses = [model(part).square().mean() / parts for part in batch.chunk(parts)]
        (factor * torch.stack(losses).sum()).backward()

    for switched, verdict in ((partial(step, 1.0, parts=2), "rounding"), (partial(step, 1 + 2**-8), "different")):
        report = verify(lambda: step(1.0), switched, steps=1)
        assert report.verdict == verdict, report
