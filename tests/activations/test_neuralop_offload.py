"""Tests that neuralop's models, offloaded and checkpointed, give the plain gradients and move only activations."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal
from late_imports import LateModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_memopt import ActivationOffloader, SyncCopier, apply_selective_checkpointing
from hf_memopt.memory import SavedBytes

darcy = LateModule("hf_memopt.recipes.neural_operator.darcy")
neural_operator_model = LateModule("hf_memopt.recipes.neural_operator.step")
neural_operator_options = LateModule("hf_memopt.recipes.neural_operator.options")
neuralop = LateModule("neuralop")
pt_dataset = LateModule("neuralop.data.datasets.pt_dataset")
models = LateModule("neuralop.models")
training = LateModule("neuralop.training")


CPU = torch.device("cpu")
KINDS = ["fno", "tfno", "uno"]

Saving = Callable[[nn.Module], AbstractContextManager[Any]]


def build(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = 5 if kind == "uno" else 4
    return neural_operator_model.make_model(
        neural_operator_options.ModelOptions(model=kind, modes=8, hidden_channels=8, num_layers=layers, **options)
    )


@cache
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(32)
    x = torch.randint(0, 2, (2, 1, 32, 32), generator=generator).float()
    return x, torch.randn(2, 1, 32, 32, generator=generator)


def gradients(model: nn.Module, saving: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    x, y = batch()
    model.zero_grad()
    with saving or nullcontext():
        loss = neuralop.LpLoss(d=2)(model(x), y)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@cache
def plain_gradients(kind: str) -> list[Tensor]:
    found = gradients(build(kind))
    assert all(gradient.abs().max() > 0 for gradient in found)
    return found


def offloader(mode: str = "all", copier: Any = None, **options: Any) -> ActivationOffloader:
    return ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=copier or SyncCopier(), **options)


BLOCKS, MLPS = {"checkpoint_blocks": True}, {"checkpoint_mlps": True}
LEVERS: dict[str, tuple[dict[str, bool], Callable[[], ActivationOffloader] | None]] = {
    "all, late copies": ({}, lambda: offloader(copier=AdversarialCopier("late"))),
    "blocks": (BLOCKS, None),
    "mlps": (MLPS, None),
    "blocks and mlps": (BLOCKS | MLPS, None),
    "blocks and mlps, inputs": (BLOCKS | MLPS, lambda: offloader("inputs")),
}


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_lever_gives_the_gradients_of_the_plain_run(kind: str, lever: str) -> None:
    options, make = LEVERS[lever]
    model, used = build(kind, **options), make() if make else None
    for _ in range(2):  # the second pass prefetches
        saving = used.offload_context(model) if used else None
        assert equal(gradients(model, saving=saving), plain_gradients(kind))
    if used:
        assert used.stats.bytes_moved > 0
        assert used.stats.host_bytes_live == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_is_kept_with_the_gradients_of_the_plain_run(kind: str) -> None:
    model = build(kind)
    budget_gib = 0.5 * saved_bytes(model) / 2**30
    used = offloader("auto", budget_gib=budget_gib)
    for _ in range(4):
        assert equal(gradients(model, saving=used.offload_context(model)), plain_gradients(kind))
    assert used.stats.predicted_peak_gib <= budget_gib
    assert used.stats.measured_peak_gib <= budget_gib


@pytest.mark.parametrize("kind", KINDS)
def test_fourier_transforms_stay_in_float32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    transform = torch.fft.rfftn
    monkeypatch.setattr(torch.fft, "rfftn", lambda x, **options: (seen.append(x.dtype), transform(x, **options))[1])
    model = build(kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.lifting(torch.ones(1, 3, 16, 16)).dtype == torch.bfloat16
        model(batch()[0])
    assert len(seen) == (5 if kind == "uno" else 4)
    assert set(seen) == {torch.float32}


def test_selective_checkpointing_of_the_blocks() -> None:
    model, want = build("fno"), plain_gradients("fno")
    handle = apply_selective_checkpointing(model, "heavy_ops", modules=["FNOBlocks"])
    with SavedBytes(exclude=model.parameters()) as selective:
        assert equal(gradients(model), want)
    handle.remove()
    checkpointed = saved_bytes(build("fno", **BLOCKS))
    assert checkpointed < selective.total_bytes < saved_bytes(model)


def saved_bytes(model: nn.Module) -> int:
    with SavedBytes(exclude=model.parameters()) as saved:
        model(batch()[0])
    return saved.total_bytes


@pytest.mark.parametrize(("nodes", "mib_per_sample"), [(64, 13.7), (128, 54.3), (256, 216.9)])
def test_bytes_per_sample_of_a_published_size(nodes: int, mib_per_sample: float) -> None:
    """Compare with bytes measured separately with neuralop 2.0.0."""
    model = models.FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, projection_channel_ratio=2)
    with SavedBytes(exclude=model.parameters()) as saved:
        model(torch.randn(1, 1, nodes, nodes))
    assert saved.total_bytes / 2**20 == pytest.approx(mib_per_sample, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_each_checkpointing_flag_saves_its_own_share(kind: str) -> None:
    none, blocks, mlps, both = (saved_bytes(build(kind, **flags)) for flags in ({}, BLOCKS, MLPS, BLOCKS | MLPS))
    assert both < min(blocks, mlps) < max(blocks, mlps) < none
    by_blocks, by_mlps = none - blocks, none - mlps
    assert both == none - by_blocks - by_mlps


@pytest.mark.parametrize("kind", ["fno", "tfno"])  # a UNO has no such methods
def test_neuralops_checkpoints_of_a_wrapped_model(kind: str, tmp_path: Path) -> None:
    model = build(kind, **BLOCKS)
    offloader().wrap(model)
    model.save_checkpoint(tmp_path, "model")
    torch.manual_seed(1)
    loaded = {"fno": models.FNO, "tfno": models.TFNO}[kind].from_checkpoint(tmp_path, "model")
    assert equal(gradients(loaded), plain_gradients(kind))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tests = [darcy.Darcy("test", resolution, 4) for resolution in (16, 32)]
    folder = darcy.cached_folder(tmp_path_factory.mktemp("darcy"), darcy.Darcy("train", 16, 16), tests, CPU)
    return pt_dataset.PTDataset(folder, "darcy", 16, [4, 4], 8, [4, 4], 16, [16, 32])


def small_fno() -> nn.Module:
    torch.manual_seed(0)
    return models.FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=8, projection_channel_ratio=2)


def train_by_trainer(samples: Any, model: nn.Module) -> tuple[list[Tensor], dict[str, float]]:
    optimizer = training.AdamW(model.parameters(), lr=8e-3, weight_decay=1e-4)
    trainer = neuralop.Trainer(model=model, n_epochs=2, device="cpu", data_processor=samples.data_processor)
    tests = {nodes: DataLoader(test, 4) for nodes, test in samples.test_dbs.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*received unexpected keyword arguments")
        found = trainer.train(
            DataLoader(samples.train_db, 8),
            tests,
            optimizer,
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2),
            training_loss=neuralop.H1Loss(d=2),
            eval_losses={"l2": neuralop.LpLoss(d=2)},
        )
    return [parameter.detach().clone() for parameter in model.parameters()], found


def test_neuralops_trainer_needs_nothing_but_a_wrapped_model(samples: Any) -> None:
    plain, errors = train_by_trainer(samples, small_fno())
    model, used = small_fno(), offloader(copier=AdversarialCopier("random"))
    handle = used.wrap(model)
    offloaded, same_errors = train_by_trainer(samples, model)
    assert equal(offloaded, plain)
    assert {name: same_errors[name] for name in ("16_l2", "32_l2")} == {n: errors[n] for n in ("16_l2", "32_l2")}
    assert math.isfinite(errors["32_l2"])
    moved = used.stats.bytes_moved
    assert moved > 0
    assert used.stats.host_bytes_live == 0
    handle.remove()
    gradients(model)
    assert used.stats.bytes_moved == moved
