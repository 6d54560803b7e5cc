from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from counted_allocator import CountedAllocator
from lgt_toys import gradient, random_batch, tiny, trained_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.recipes.lgt import model as lgt_model
from hf_memopt.recipes.lgt.data import Batch, make_batch
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.recipes.lgt.step import Objective, build_model, build_optimizer
from hf_memopt.training import GradientCache, split_batch, train_step


def cut(batch: Batch, lengths: list[int]) -> list[Batch]:
    parts = zip(*(tensor.split(lengths) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


SPLITS = [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [3, 3, 2], [5, 2, 1]]


@pytest.mark.parametrize("lengths", SPLITS, ids=str)
def test_any_split_of_an_additive_loss_gives_the_same_gradient(lengths: list[int]) -> None:
    """Compare means over samples, without noise on styles, in fp64 to 1e-12: sums are reordered."""
    config = tiny(model__style_noise=0.0, loss__w_style=0.0, loss__use_velocity_reg=True)
    model, batch = trained_model(config, torch.float64), random_batch(config, torch.float64)
    Objective(config)(model, batch).backward()
    want = gradient(model)
    accelerator, got = Accelerator(cpu=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *event: got.append(gradient(model)))
    model, optimizer = accelerator.prepare(model, optimizer)
    train_step(
        accelerator, model, Objective(config), cut(batch, lengths), optimizer, weight_fn=lambda part: len(part["time"])
    )
    assert want.norm() > 0.01
    assert (got[0] - want).abs().max() <= 1e-12


def cached(model: nn.Module, config: Options, parts: list[Batch]) -> Tensor:
    objective = Objective(config)
    cache = GradientCache(Accelerator(cpu=True), partial(objective.outputs, model), objective.loss, models=[model])
    torch.manual_seed(2)
    cache.backward(parts)
    return gradient(model)


def relative(vector: Tensor, reference: Tensor) -> float:
    return ((vector - reference).norm() / reference.norm()).item()


def test_gradient_cache_is_the_full_batch_where_accumulation_is_not() -> None:
    """Compare in fp64 to 1e-12: sums are reordered."""
    config = tiny(model__style_noise=0.0, training__batch_size=16)
    model, batch = trained_model(config, torch.float64), random_batch(config, torch.float64)
    objective = Objective(config)
    torch.manual_seed(2)
    objective(model, batch).backward()
    want = gradient(model)
    parts = list(split_batch(batch, 4))
    assert relative(cached(model, config, parts), want) <= 1e-12
    for part in parts:
        torch.manual_seed(2)  # along the same directions
        (objective(model, part) / len(parts)).backward()
    naive = gradient(model)
    assert torch.cosine_similarity(naive, want, dim=0) < 0.95
    assert relative(naive, want) > 0.3


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradient_cache_replays_the_noise_on_styles(checkpointing: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Compare with micro-batches in one graph: fp32 batches of other sizes round otherwise, and numbers cancel."""
    config = tiny(model__style_noise=0.5, training__use_gradient_checkpointing=checkpointing)
    model, batch = trained_model(config, dtype), random_batch(config, dtype)
    objective, parts = Objective(config), list(split_batch(batch, 3))
    torch.manual_seed(2)
    outputs = [objective.outputs(model, part) for part in parts]
    objective.loss(*map(torch.cat, zip(*outputs, strict=True))).backward()
    want = gradient(model)
    assert relative(cached(model, config, parts), want) <= tolerance


def training_step(config: Options, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Forward, backward and update without accelerate."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.training.use_amp):
        loss = Objective(config)(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def three_steps(config: Options, **offloading: Any) -> list[Tensor]:
    """Copies of the weights after three steps of a model whose layers are not zero."""
    model = trained_model(config).train()
    optimizer, batch = build_optimizer(config, model), random_batch(config)
    handle = ActivationOffloader(copier=SyncCopier(), **offloading).wrap(model) if offloading else None
    torch.manual_seed(3)
    for _ in range(3):
        training_step(config, model, optimizer, batch)
    if handle is not None:
        handle.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.sweep(share=0.5)
def test_checkpointing_and_offloading_change_no_bit(use_amp: bool) -> None:
    options = {"model__style_noise": 0.3, "training__use_amp": use_amp, "loss__use_velocity_reg": True}
    want = three_steps(tiny(**options))
    checkpointed = tiny(**options, training__use_gradient_checkpointing=True)
    assert equal(three_steps(checkpointed), want)
    assert equal(three_steps(tiny(**options), mode="all", offload_threshold_mb=0), want)
    assert equal(three_steps(checkpointed, mode="inputs", offload_threshold_mb=0), want)


@pytest.mark.slow
def test_without_the_random_numbers_checkpointing_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model__style_noise": 0.3}
    want = three_steps(tiny(**options))
    monkeypatch.setattr(lgt_model, "checkpoint", partial(lgt_model.checkpoint, preserve_rng_state=False))
    assert not equal(three_steps(tiny(**options, training__use_gradient_checkpointing=True)), want)


def peak_bytes(config: Options) -> int:
    model, batch = trained_model(config), random_batch(config)
    optimizer = build_optimizer(config, model)
    training_step(config, model, optimizer, batch)  # makes the optimizer's state
    with CountedAllocator(2**40) as allocator:
        training_step(config, model, optimizer, batch)
    return allocator.peak_bytes


@pytest.mark.slow
def test_memory_is_linear_in_euler_steps_and_flat_with_checkpointing() -> None:
    """Compare peaks: checkpointing keeps one state per step, and the tensors of their sum."""
    plain, checkpointed = (
        [
            peak_bytes(tiny(training__ode_integration_steps=n, training__use_gradient_checkpointing=each))
            for n in (2, 4, 6)
        ]
        for each in (False, True)
    )
    first, second = plain[1] - plain[0], plain[2] - plain[1]
    assert first == pytest.approx(second, rel=0.01)
    assert first > 500_000
    latents_bytes = random_batch(tiny())["latents"].nbytes
    assert checkpointed[2] - checkpointed[0] <= 4 * 2 * latents_bytes
    assert checkpointed[2] - checkpointed[0] < 0.05 * (plain[2] - plain[0])


def test_components_are_averaged_over_micro_batches() -> None:
    config = tiny(loss__use_velocity_reg=True, loss__w_style=2.0, loss__w_content=3.0, loss__vel_reg_weight=0.5)
    model, objective = trained_model(config), Objective(config)
    batch = random_batch(config)
    batch["style_weights"] = torch.full((8,), 4.0)
    losses = torch.stack([objective(model, part) for part in cut(batch, [4, 4])])
    means = objective.take_means()
    assert means["loss"] == losses.mean()
    total = 2 * 4 * means["style_swd"] + 3 * means["content_ssm"] + 0.5 * means["velocity"]
    assert total == pytest.approx(means["loss"].item(), rel=1e-6)
    assert objective.take_means() == {}


@pytest.mark.slow
def test_a_step_runs_on_tensors_without_data() -> None:
    """Run on fake tensors, which estimates need and which fail at each read of a value."""
    config = tiny(training__use_gradient_checkpointing=True, training__use_amp=True, loss__max_samples=100)
    with FakeTensorMode():
        model = build_model(config)
        loss = training_step(config, model, build_optimizer(config, model), make_batch(config, "cpu"))
    assert loss.shape == ()
