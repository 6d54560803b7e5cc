"""Canaries of the training step in accelerate, torch's DDP and autocast."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from reliance import relied_on_by
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP = "hf_memopt/training/step.py"
MICRO_BATCH = "hf_memopt/training/micro_batch.py"
GRADIENT_CACHE = "hf_memopt/training/gradient_cache.py"


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def test_backward_divides_by_the_accumulation_steps_and_scales() -> None:
    with relied_on_by(STEP):
        accelerator, model, _ = prepared(gradient_accumulation_steps=4)
        accelerator.backward(model(torch.ones(1, 4)).sum())
        assert model.bias.grad.item() == 0.25
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        accelerator.backward(model(torch.ones(1, 4)).sum())
        assert model.bias.grad.item() == 2.25


def test_the_optimizer_ignores_calls_in_the_middle_of_a_window() -> None:
    """Watch the reason for refusing a step inside of `accumulate`."""
    with relied_on_by(STEP):
        accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
        before = model.weight.detach().clone()
        assert accelerator.sync_gradients
        with accelerator.accumulate(model):
            assert not accelerator.sync_gradients
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, before)
        assert model.weight.grad is not None


def test_the_step_counter_is_saved_and_restored(tmp_path: Path) -> None:
    with relied_on_by(STEP):
        accelerator, *_ = prepared()
        assert accelerator.step == 0
        accelerator.step = 7
        accelerator.save_state(str(tmp_path))
        accelerator.step = 0
        accelerator.load_state(str(tmp_path))
        assert accelerator.step == 7


def test_clipping_tells_the_norm_before_and_clips_nothing_at_infinity() -> None:
    with relied_on_by(STEP):
        accelerator, model, _ = prepared()
        model(torch.ones(3, 4)).square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        torch.testing.assert_close(norm, torch.cat([each.flatten() for each in gradients]).norm())
        torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), 0.1), norm)


def test_skipped_steps_are_told() -> None:
    with relied_on_by(STEP):
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = nn.Linear(4, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for factor, skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
            accelerator.backward(model(torch.ones(1, 4)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped == skipped
        assert accelerator.scaler.get_scale() == 4.0


def test_accelerate_does_not_recognise_every_lack_of_memory() -> None:
    """Watch errors that Accelerate's own test misses; once it recognises all, ours can go."""
    with relied_on_by(MICRO_BATCH):
        assert should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate 1 MiB."))
        assert not should_reduce_batch_size(RuntimeError("CUDA error: out of memory"))
        assert not should_reduce_batch_size(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))


def test_ddp_shares_buffers_in_the_forward_that_follows_an_exchange() -> None:
    with relied_on_by(MICRO_BATCH):
        assert "broadcast_buffers" in inspect.signature(DistributedDataParallel).parameters
        source = inspect.getsource(DistributedDataParallel.will_sync_module_buffers)
        assert "self.require_forward_param_sync" in source
        assert re.search(r"self\.(broadcast|forward_sync)_buffers\b", source)  # the latter from torch 2.15 on
        assert "self.require_forward_param_sync = False" in inspect.getsource(DistributedDataParallel._post_forward)


def test_autocast_does_not_reuse_casts_that_were_made_without_gradients() -> None:
    """Watch one autocast region: casts of a pass without gradients would have no gradient later."""
    with relied_on_by(GRADIENT_CACHE):
        model = nn.Linear(4, 1)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(torch.ones(1, 4))
            model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is not None
