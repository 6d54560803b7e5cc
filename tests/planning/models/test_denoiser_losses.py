"""Losses and the shapes of inputs, equal to those of diffusers' scripts and pipelines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser_toys import SMALL, write_denoiser
from late_imports import LateModule
from torch import Tensor, nn
from transformers_toys import options_of

from hf_memopt.planning.models import denoiser_family
from hf_memopt.planning.models.denoiser_families import FAMILIES

diffusers = LateModule("diffusers")

LATENTS = torch.linspace(-1, 1, 2 * 8 * 4 * 6).view(2, 8, 4, 6)


class Remembering(nn.Module):
    """Returns its input changed, and remembers its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = kwargs
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return ([-each for each in hidden] if isinstance(hidden, list) else -hidden,)


def predicted(name: str, **conditions: Any) -> tuple[Tensor, dict[str, Any]]:
    model = Remembering()
    found = FAMILIES[name].predict(model, LATENTS, torch.tensor([250.0, 500.0]), conditions)
    return found, model.given


def test_flux_and_qwen_image_take_squares_as_their_pipelines_do() -> None:
    for name, pipeline in (
        ("FluxTransformer2DModel", diffusers.FluxPipeline),
        ("QwenImageTransformer2DModel", diffusers.QwenImagePipeline),
    ):
        found, given = predicted(name)
        assert torch.equal(given["hidden_states"], pipeline._pack_latents(LATENTS, 2, 8, 4, 6))
        assert torch.equal(given["timestep"], torch.tensor([0.25, 0.5]))
        assert torch.equal(found, -LATENTS)
    assert given["img_shapes"] == [(1, 2, 3)] * 2


def test_flux2_takes_rows_as_its_pipeline_does() -> None:
    found, given = predicted("Flux2Transformer2DModel")
    assert torch.equal(given["hidden_states"], diffusers.Flux2Pipeline._pack_latents(LATENTS))
    ids = diffusers.Flux2Pipeline._prepare_latent_ids(LATENTS)
    assert torch.equal(found, diffusers.Flux2Pipeline._unpack_latents_with_ids(-given["hidden_states"], ids))


def test_ltx_takes_rows_as_its_pipeline_does() -> None:
    video, model = LATENTS.view(2, 8, 2, 2, 6), Remembering()
    found = FAMILIES["LTXVideoTransformer3DModel"].predict(model, video, torch.zeros(2), {})
    assert torch.equal(model.given["hidden_states"], diffusers.LTXPipeline._pack_latents(video))
    assert torch.equal(found, -video)


def test_models_that_reverse_time_learn_the_same_velocity() -> None:
    """A perfect model's loss is 0: from noisy latents and time it knows the velocity from noise to data."""
    data = torch.full((2, 4, 8, 8), 2.0)

    class Perfect(nn.Module):
        def forward(self, hidden_states: Tensor, timestep: Tensor, **others: Any) -> tuple[Tensor]:
            share = timestep.view(-1, 1, 1, 1)  # of data
            noise = (hidden_states - share * data) / (1 - share)
            return (data - noise,)

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        return FAMILIES["Lumina2Transformer2DModel"].predict(Perfect(), noisy, times, {})

    torch.manual_seed(0)
    assert denoiser_family.flow_loss(predict, data) < 1e-6


@pytest.mark.parametrize("loss", [denoiser_family.noise_loss, denoiser_family.flow_loss, denoiser_family.data_loss])
def test_a_loss_is_that_of_the_script(loss: Callable[..., Tensor]) -> None:
    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        return noisy.cos() * times.view(-1, 1, 1, 1) / 1000

    torch.manual_seed(0)
    found = loss(predict, LATENTS)
    torch.manual_seed(0)
    assert torch.equal(found, SCRIPTS[loss.__name__](predict))


def _noise(predict: Callable[..., Tensor]) -> Tensor:
    """As in train_text_to_image.py."""
    noise = torch.randn_like(LATENTS)
    timesteps = torch.randint(0, 1000, (2,))
    noisy = diffusers.DDPMScheduler().add_noise(LATENTS, noise, timesteps)
    return nn.functional.mse_loss(predict(noisy, timesteps).float(), noise.float(), reduction="mean")


def _flow(predict: Callable[..., Tensor]) -> Tensor:
    """As in train_dreambooth_lora_flux.py, at times that are spread evenly."""
    noise = torch.randn_like(LATENTS)
    timesteps = torch.rand(2) * 1000
    sigmas = (timesteps / 1000)[:, None, None, None]
    model_pred = predict((1.0 - sigmas) * LATENTS + sigmas * noise, timesteps)
    weighting = diffusers.training_utils.compute_loss_weighting_for_sd3("none", sigmas)
    errors = (weighting.float() * (model_pred.float() - (noise - LATENTS).float()) ** 2).reshape(2, -1)
    return torch.mean(errors, 1).mean()


def _data(predict: Callable[..., Tensor]) -> Tensor:
    """As in train_cogvideox_lora.py."""
    scheduler = diffusers.CogVideoXDPMScheduler()
    noise = torch.randn_like(LATENTS)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (2,))
    noisy = scheduler.add_noise(LATENTS, noise, timesteps)
    model_pred = scheduler.get_velocity(predict(noisy, timesteps), noisy, timesteps)
    weights = 1 / (1 - scheduler.alphas_cumprod[timesteps])
    while len(weights.shape) < len(model_pred.shape):
        weights = weights.unsqueeze(-1)
    return torch.mean((weights * (model_pred - LATENTS) ** 2).reshape(2, -1), dim=1).mean()


SCRIPTS = {"noise_loss": _noise, "flow_loss": _flow, "data_loss": _data}


def test_hidream_computes_its_experts_as_its_script_has_it(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "hidream", force_inference_output=False)
    options = options_of(folder, **SMALL["hidream"])
    assert options.kind_of_task.build(options.config, "it").config.force_inference_output
