"""Tests of ActivationOffloader: bitwise gradients for all saved tensors and times of copies, and nothing left over."""

import gc
import logging
import re
import sys
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from gradients import equal, language_loss, take_gradients
from torch import Tensor, nn
from torch._logging._internal import warning_once
from torch.utils.checkpoint import checkpoint

from hf_memopt.activations import ActivationOffloader, wrap_forward_with_offload
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.host_arena import HostArena

# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("prefetch_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_bitwise_the_plain_ones(
    decoder: nn.Module, tokens: Tensor, make: Any, prefetch_ahead: int, autocast: bool
) -> None:
    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return language_loss(decoder, tokens)

    loss().backward()
    want = take_gradients(decoder)
    offloader = make(prefetch_ahead=prefetch_ahead)
    allocations = []
    for _ in range(4):
        with offloader.offload_context(decoder):
            value = loss()
        value.backward()
        assert equal(take_gradients(decoder), want)
        allocations.append(offloader.stats.num_host_allocations)
    assert allocations[1] == allocations[3] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_regions_offload_their_inputs(
    decoder: nn.Module, tokens: Tensor, make: Any, use_reentrant: bool
) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    plain, checkpointed = make(), make()
    with plain.offload_context(decoder):
        language_loss(decoder, tokens).backward()
    decoder.zero_grad()
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    moved = plain.stats.bytes_moved
    with checkpointed.offload_context(decoder):
        loss = language_loss(decoder, tokens)
    loss.backward()
    assert equal(take_gradients(decoder), want)
    assert 0 < checkpointed.stats.bytes_moved < moved


# ------------------------------------------------------------------------------------------------ lifetime


def test_nothing_is_left_after_a_dropped_graph_or_an_exception(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    offloader = make()
    with offloader.offload_context(decoder):
        loss = language_loss(decoder, tokens)
    assert offloader.stats.host_bytes_live > 0
    del loss
    gc.collect()
    assert offloader.stats.host_bytes_live == 0
    with pytest.raises(IndexError), offloader.offload_context(decoder):
        language_loss(decoder, tokens + 1000)
    gc.collect()
    assert offloader.stats.host_bytes_live == 0
    x = torch.randn(4, requires_grad=True)
    (x * x).sum().backward()  # no hook is left
    assert offloader.stats.host_bytes_live == 0


def test_a_fault_in_any_copy_or_wait_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)  # dying payloads wait, and their errors are ignored
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    want = take_gradients(model)
    counter = AdversarialCopier("late")
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=counter)
    with offloader.offload_context(model):
        loss = model(x).sum()
    loss.backward()
    take_gradients(model)
    for fail_at in range(1, counter.num_operations + 1):
        copier = AdversarialCopier("late", 0, fail_at)
        offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=copier)
        for attempt in range(2):
            try:
                with offloader.offload_context(model):
                    loss = model(x).sum()
                loss.backward()
            except InjectedError:
                assert attempt == 0
                model.zero_grad()
                continue
            assert equal(take_gradients(model), want)
        del loss
        gc.collect()
        assert offloader.stats.host_bytes_live == 0


def test_three_hundred_steps_keep_memory_flat(make: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    offloader = make()
    sizes = []
    for step in range(300):
        with offloader.offload_context(model):
            loss = model(torch.randn(4 + step % 3, 16)).sum()
        loss.backward()
        sizes.append((offloader.stats.host_bytes_pinned, offloader.stats.num_host_allocations))
    assert sizes[5] == sizes[-1]


# ------------------------------------------------------------------------------------------------ host memory


def test_the_budget_is_never_exceeded_and_gradients_stay_exact(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    offloader = make(host_budget_gib=100_000 / 2**30)
    for _ in range(2):
        with offloader.offload_context(decoder):
            loss = language_loss(decoder, tokens)
        assert offloader.stats.host_bytes_pinned <= 100_000
        loss.backward()
        assert equal(take_gradients(decoder), want)
    assert offloader.stats.bytes_kept > 0


# ------------------------------------------------------------------------------------------------ use


def test_wrap_forward_with_offload_is_the_same_function(copier: Copier) -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    torch.tanh(layer(x)).sum().backward()
    want = take_gradients(layer)
    forward = wrap_forward_with_offload(layer.forward, mode="all", offload_threshold_mb=0, copier=copier)
    torch.tanh(forward(x)).sum().backward()
    assert equal(take_gradients(layer), want)
    assert copier.bytes_to_host == x.nbytes


def test_disabled_or_on_the_cpu_nothing_moves(decoder: nn.Module, tokens: Tensor) -> None:
    for options in ({"enabled": False, "copier": SyncCopier()}, {}):
        offloader = ActivationOffloader(offload_threshold_mb=0, **options)
        with offloader.offload_context(decoder):
            language_loss(decoder, tokens).backward()
        assert offloader.stats.bytes_moved == 0


def test_a_context_inside_a_checkpointed_region_is_exact(make: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    torch.tanh(layer(x)).sum().backward()
    want = [x.grad.clone(), *take_gradients(layer)]
    x.grad = None
    offloader = make()

    def block(y: Tensor) -> Tensor:
        with offloader.offload_context(layer):
            return torch.tanh(layer(y))

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert equal([x.grad, *take_gradients(layer)], want)


def test_a_copier_of_the_cpu_is_refused_elsewhere() -> None:
    offloader = ActivationOffloader(copier=SyncCopier())
    with pytest.raises(ValueError, match=r"copier=SyncCopier\(\) .* tensors are on meta; leave copier out"):
        with offloader.offload_context(nn.Linear(2, 2, device="meta")):
            pass


def test_the_log_says_what_host_memory_is_taken_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(SyncCopier())
    with caplog.at_level(logging.INFO, "hf_memopt"):
        blocks = [arena.acquire(2**20) for _ in range(512)]
        arena.log_growth()
        arena.log_growth()
        for block in blocks:
            assert block is not None
            arena.release(block)
        arena.trim()
        arena.trim()
    taken, given_back = (record.message for record in caplog.records)
    assert re.fullmatch(
        r"activation offloading: took 512\.00 MiB of host memory in .* m?s, holds 512\.00 MiB in 512 allocations; .*",
        taken,
    )
    assert given_back.startswith("activation offloading: gave 512.00 MiB of host memory back")


def test_everything_is_kept_while_a_cuda_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    warning_once.cache_clear()
    copier = AdversarialCopier()
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        for _ in range(2):
            with offloader.offload_context(model):
                model(torch.ones(2, 4)).tanh().sum().backward()
    assert copier.num_operations == 0
    assert [record.message for record in caplog.records] == [
        "activation offloading: everything stays on the device while a CUDA graph is captured"
    ]
