import pytest
import torch
from lgt_toys import random_batch, tiny, trained_model
from torch import Tensor

from hf_memopt.recipes.lgt.model import LatentTransfer, euler
from hf_memopt.recipes.lgt.options import ModelOptions
from hf_memopt.recipes.lgt.step import Objective, build_model


def test_the_default_model_has_about_20_million_parameters() -> None:
    with torch.device("meta"):
        model = LatentTransfer(ModelOptions())
    assert sum(parameter.numel() for parameter in model.parameters()) == 20_337_924


def test_a_new_model_is_the_identity_and_learns_in_its_last_layer() -> None:
    config = tiny()
    model, batch = build_model(config), random_batch(config)
    moved, energy = model(batch["start"], batch["time"], batch["targets"], batch["dropped"], 3)
    assert torch.equal(moved, batch["start"])
    assert not energy.any()
    Objective(config)(model, batch).backward()
    moving = [name for name, parameter in model.named_parameters() if parameter.grad.any()]
    assert moving == ["unet.last.2.weight", "unet.last.2.bias"]


def test_euler_arrives_at_the_end_of_time_and_the_original_does_not() -> None:
    latents, time = torch.zeros(3, 1, 1, 1, dtype=torch.float64), torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64)

    def one(latents: Tensor, time: Tensor) -> Tensor:
        return torch.ones_like(latents)

    for num_steps in (1, 5, 10):
        assert torch.allclose(euler(one, latents, time, num_steps).flatten(), 1 - time, rtol=0, atol=1e-15)
    arrived = [euler(one, latents, time, n, legacy_dt=True)[0].item() for n in (5, 10)]
    assert arrived == pytest.approx([0.672, 0.651], abs=5e-4)


def test_each_steps_velocity_is_that_of_its_own_time() -> None:
    seen = []

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        seen.append(time.item())
        return latents

    moved = euler(velocity, torch.ones(1, 1, 1, 1), torch.tensor([0.5]), 2)
    assert seen == [0.5, 0.75]
    assert moved.item() == 1.25**2


def test_the_velocity_term_is_that_of_the_first_step() -> None:
    config = tiny(model__style_noise=0.0)
    model, batch = trained_model(config), random_batch(config)
    inputs = batch["start"], batch["time"], batch["targets"], batch["dropped"]
    _, energy = model(*inputs, 3)
    assert torch.equal(energy, model.unet(*inputs).square().mean(dim=(1, 2, 3)))


def test_dropped_samples_have_no_style() -> None:
    for learned in (True, False):
        config = tiny(model__style_noise=0.0, training__use_avg_style_for_uncond=learned)
        model, batch = trained_model(config), random_batch(config)
        others = 1 - batch["targets"]
        moved = [
            model(batch["start"], batch["time"], each, batch["dropped"], 1)[0] for each in (batch["targets"], others)
        ]
        same = (moved[0] == moved[1]).flatten(1).all(dim=1)
        assert torch.equal(same, batch["dropped"])
        assert ("unet.condition.no_style" in dict(model.named_parameters())) == learned
