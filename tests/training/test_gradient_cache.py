"""Tests that GradientCache gives the full batch's gradient of losses that are no sums, where accumulation does not."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.training import GradientCache, NonFiniteGradientError

NUM_SAMPLES = 24


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        output = self.last(hidden)
        self.outputs.append(output.detach().clone())
        return output

    def block(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.first(x)))


def samples(num: int = NUM_SAMPLES, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def target(num: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(num, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype) * 2


def sliced_wasserstein(output: Tensor) -> Tensor:
    """Return a distance along 16 directions, which each call draws anew."""
    directions = torch.randn(5, 16, dtype=output.dtype)
    directions = directions / directions.norm(dim=0)
    other = target(len(output), output.dtype)
    return ((output @ directions).sort(0).values - (other @ directions).sort(0).values).square().mean()


def contrastive(output: Tensor) -> Tensor:
    """Return a loss in which a sample's predecessor is its positive, and all others are negatives."""
    normed = nn.functional.normalize(output, dim=1)
    return nn.functional.cross_entropy(10 * normed @ normed.roll(1, 0).t(), torch.arange(len(output)))


def batch_statistics(output: Tensor) -> Tensor:
    return (torch.cov(output.t()) - torch.eye(5, dtype=output.dtype)).square().sum()


LOSSES = {each.__name__: each for each in (sliced_wasserstein, contrastive, batch_statistics)}


def gradient(model: nn.Module) -> Tensor:
    """Return and clear all gradients, as one vector."""
    vector = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return vector


def full_batch(model: Encoder, loss_fn: Callable[..., Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    loss = loss_fn(model(batch))
    loss.backward()
    return loss.detach(), gradient(model)


def cached(
    accelerator: Accelerator, model: nn.Module, loss_fn: Callable[..., Tensor], micro_batches: Any
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    loss = GradientCache(accelerator, model, loss_fn).backward(micro_batches)
    return loss, gradient(model)


def relative(vector: Tensor, reference: Tensor) -> float:
    return ((vector - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_equals_the_full_batch_where_accumulation_does_not(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Allow for sums in another order, with 2 samples at a time."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)  # without effect on the cache
    model, loss_fn = accelerator.prepare(Encoder().to(dtype)), LOSSES[name]
    batch = samples(dtype=dtype)
    want_loss, want = full_batch(model, loss_fn, batch)
    loss, got = cached(accelerator, model, loss_fn, batch.split(2))
    assert relative(got, want) <= tolerance
    assert loss.item() == pytest.approx(want_loss.item(), rel=tolerance)
    assert not loss.requires_grad
    for part in batch.split(2):
        torch.manual_seed(3)  # along the same directions
        (loss_fn(model(part)) / 12).backward()
    accumulated = gradient(model)
    assert torch.cosine_similarity(accumulated, want, dim=0) < 0.98
    assert relative(accumulated, want) > 0.2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from(sorted(LOSSES)))
def test_any_split_gives_the_full_batch(lengths: list[int], name: str) -> None:
    lengths = [*lengths, 2]  # two samples at least, for a covariance
    accelerator, model = Accelerator(cpu=True), Encoder().double()
    batch = samples(sum(lengths), torch.float64)
    _, want = full_batch(model, LOSSES[name], batch)
    _, got = cached(accelerator, model, LOSSES[name], batch.split(lengths))
    assert relative(got, want) <= 1e-11


def test_random_numbers_are_replayed_bitwise_and_go_on_as_after_one_forward() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder(dropout=0.4)
    noises = []

    def forward(batch: Tensor) -> Tensor:
        noises.append(random.random())
        return model(batch) * (1 + noises[-1])

    torch.manual_seed(3)
    for part in samples().split(4):
        model(part)
    sliced_wasserstein(model.outputs[0])
    after = torch.rand(1)
    model.outputs.clear()
    torch.manual_seed(3)
    GradientCache(accelerator, forward, sliced_wasserstein).backward(samples().split(4))
    assert torch.equal(torch.rand(1), after)
    assert len(model.outputs) == len(noises) == 12
    assert all(torch.equal(a, b) for a, b in zip(model.outputs[:6], model.outputs[6:], strict=True))
    assert noises[:6] == noises[6:]
    assert len(set(noises)) == 6
    assert random.random() not in noises


def test_with_dropout_the_gradient_is_that_of_the_micro_batches_as_one_graph() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder(dropout=0.4).double()
    parts = samples(dtype=torch.float64).split(4)
    torch.manual_seed(3)
    sliced_wasserstein(torch.cat([model(part) for part in parts])).backward()
    want = gradient(model)
    assert relative(cached(accelerator, model, sliced_wasserstein, parts)[1], want) <= 1e-12


@pytest.mark.parametrize("where", ["accelerate", "outside"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_autocast(where: str, checkpointed: bool) -> None:
    """Try autocast around each forward pass, and around both with one cache of cast weights."""
    mixed_precision = "bf16" if where == "accelerate" else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = accelerator.prepare(Encoder(dropout=0.2, checkpointed=checkpointed))
    parts = samples().split(4)

    def loss_fn(output: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return sliced_wasserstein(output.float())

    with torch.autocast("cpu", torch.bfloat16) if where == "outside" else nullcontext():
        torch.manual_seed(3)
        loss_fn(torch.cat([model(part) for part in parts])).backward()
        want = gradient(model)
        got = cached(accelerator, model, loss_fn, parts)[1]
    assert len(got) == len(want)
    # One graph adds gradients of casts in bf16; GradientCache adds gradients of micro-batches in fp32.
    assert relative(got, want) < 1e-2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpointing_and_offloading_change_no_bit(checkpointed: bool, wrapped: bool) -> None:
    accelerator = Accelerator(cpu=True)
    parts = samples().split(4)
    want = cached(accelerator, Encoder(dropout=0.3), sliced_wasserstein, parts)[1]
    model = Encoder(dropout=0.3, checkpointed=checkpointed)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    handle = offloader.wrap(model) if wrapped else None
    assert torch.equal(cached(accelerator, model, sliced_wasserstein, parts)[1], want)
    assert (offloader.stats.bytes_moved > 0) == wrapped
    if handle is not None:
        handle.remove()


def test_several_outputs_some_of_which_have_no_gradient_and_a_loss_with_parameters() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder().double()
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    labels = torch.arange(NUM_SAMPLES) % 3

    def forward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        output = model(batch[0])
        return output, batch[1], output.detach().square(), output[:, :2] * 3, output * 2

    def loss_fn(output: Tensor, labels: Tensor, fixed: Tensor, other: Tensor, unused: Tensor) -> Tensor:
        centres = torch.stack([output[labels == label].mean(0) for label in range(3)])
        return scale * (centres - other.mean()).square().sum() + fixed.mean()

    batch = samples(dtype=torch.float64), labels
    loss_fn(*forward(batch)).backward()
    want, want_scale = gradient(model), scale.grad
    scale.grad = None
    parts = list(zip(batch[0].split(5), labels.split(5), strict=True))
    GradientCache(accelerator, forward, loss_fn).backward(parts)
    assert relative(gradient(model), want) <= 1e-12
    assert scale.grad is not None
    assert want_scale is not None
    assert relative(scale.grad, want_scale) <= 1e-12


def test_gradients_are_added_to_those_that_are_there() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder().double()
    parts = samples(dtype=torch.float64).split(6)
    alone = cached(accelerator, model, sliced_wasserstein, parts)[1]
    model(parts[0]).sum().backward()
    before = gradient(model)
    model(parts[0]).sum().backward()
    assert relative(cached(accelerator, model, sliced_wasserstein, parts)[1], alone + before) <= 1e-12


def test_a_loss_scaler_scales_every_gradient_once() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder()
    parts = samples().split(4)
    want = cached(accelerator, model, sliced_wasserstein, parts)[1]
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    assert torch.equal(cached(accelerator, model, sliced_wasserstein, parts)[1], want * 2.0**12)


def test_only_one_micro_batch_is_in_memory() -> None:
    accelerator, model = Accelerator(cpu=True), Encoder()
    live, most = 0, 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal live, most
            self.tensor = tensor
            live += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            live -= 1

    def forward(batch: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            return model(batch)

    forward(samples(4)).sum().backward()
    of_one, most = most, 0
    GradientCache(accelerator, forward, sliced_wasserstein).backward(samples().split(4))
    assert most == of_one > 0


@pytest.mark.parametrize("at", range(1, 13))
def test_after_an_exception_the_next_call_is_right(at: int) -> None:
    accelerator, model = Accelerator(cpu=True), Encoder(dropout=0.3)
    parts = samples().split(4)
    want = cached(accelerator, model, sliced_wasserstein, parts)[1]
    calls = iter(range(1, 13))

    def forward(batch: Tensor) -> Tensor:
        if next(calls) == at:
            raise torch.OutOfMemoryError("injected")
        return model(batch)

    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        GradientCache(accelerator, forward, sliced_wasserstein).backward(parts)
    model.zero_grad()
    assert torch.equal(cached(accelerator, model, sliced_wasserstein, parts)[1], want)


def test_what_would_go_wrong_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="micro_batches is empty"):
        GradientCache(accelerator, Encoder(), sliced_wasserstein).backward([])
    for output, kind in ((torch.tensor(1.0), r"a tensor \(\)"), ((torch.zeros(2), "text"), "str")):
        cache = GradientCache(accelerator, lambda batch, output=output: output, sliced_wasserstein)
        with pytest.raises(ValueError, match=kind):
            cache.backward([samples()])
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match="FSDP1 keeps gradients in flat shards"):
        GradientCache(accelerator, Encoder(), sliced_wasserstein)


def trained(take_step: Callable[[GradientCache, Accelerator, Any, Any], None], loss_fn: Any) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    encoder = Encoder(dropout=0.5)
    parameters = [*encoder.parameters(), *(loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ())]
    model, optimizer = accelerator.prepare(encoder, torch.optim.Adam(parameters, lr=0.1))
    cache = GradientCache(accelerator, model, loss_fn)
    torch.manual_seed(3)
    for batch in samples(48).split(NUM_SAMPLES):
        take_step(cache, accelerator, optimizer, batch.split(5))
    assert all(parameter.grad is None for parameter in parameters)
    return [parameter.detach() for parameter in parameters]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor) -> Tensor:
        return batch_statistics(self.scale * output)


@pytest.mark.parametrize("make_loss", [lambda: sliced_wasserstein, Scaled], ids=["function", "module"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_step_is_backward_clip_and_update(make_loss: Callable[[], Any], max_grad_norm: float | None) -> None:
    results = []

    def in_one(cache: GradientCache, accelerator: Accelerator, optimizer: Any, micro_batches: Any) -> None:
        results.append(cache.step(micro_batches, optimizer, max_grad_norm=max_grad_norm))

    by_hand = []

    def in_parts(cache: GradientCache, accelerator: Accelerator, optimizer: Any, micro_batches: Any) -> None:
        loss = cache.backward(micro_batches)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        norm = accelerator.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.append((loss.item(), norm.item()))

    ours, theirs = trained(in_one, make_loss()), trained(in_parts, make_loss())
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert [(result.loss, result.grad_norm) for result in results] == by_hand
    assert [result.num_micro_batches for result in results] == [5, 5]
    assert not any(result.skipped for result in results)


def test_a_step_that_is_not_finite_is_not_taken() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(encoder := Encoder(), torch.optim.SGD(encoder.parameters(), lr=1.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    cache = GradientCache(accelerator, model, lambda output: output.sum() * math.nan)
    with pytest.raises(NonFiniteGradientError, match=r"rank 0, micro-batch 1: last\.") as caught:
        cache.step(samples().split(6), optimizer)
    assert caught.value.step == 1
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_for_loops_that_call_backward(autocast: bool) -> None:
    """Compare bitwise with the scaled gradients of `backward`, inside and outside of autocast."""
    accelerator, model = Accelerator(cpu=True), Encoder(dropout=0.3)
    parts, region = samples().split(4), torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    # No matrix product, whose gradient would be in bfloat16 with backward inside of the region.
    cache = GradientCache(accelerator, model, lambda output: output.float().std(dim=0).sum() * torch.rand(()))
    with region:
        torch.manual_seed(3)
        want_loss = cache.backward(parts)
        after, want = torch.rand(1), gradient(model)
        torch.manual_seed(3)
        loss = cache.loss(parts)
    (loss / 4).backward()
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(loss.detach(), want_loss)
    assert torch.equal(gradient(model), want / 4)
    with torch.no_grad(), region:
        torch.manual_seed(3)
        assert torch.equal(cache.loss(parts), want_loss)
    assert not any(each.grad is not None for each in model.parameters())


def test_a_step_needs_to_know_the_models() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(encoder := Encoder(), torch.optim.SGD(encoder.parameters()))
    cache = GradientCache(accelerator, lambda batch: model(batch), contrastive)
    with pytest.raises(ValueError, match="models=None: step clips and checks"):
        cache.step(samples().split(6), optimizer)
