"""The task of a denoiser: it predicts the noise in latents, or the velocity to them, as diffusers' scripts train it."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_memopt.jobs.diffusers_models.denoiser_config import DenoiserConfig, default_dtype
from hf_memopt.jobs.diffusers_models.denoiser_families import FAMILIES, DenoiserFamily, latent_channels
from hf_memopt.jobs.transformers_models.model_batches import Sample

# Pixels on a side of the patch that a latent stands for.
_PIXELS = 8
_TIMES = 1000


class Denoising:
    """`Task` for models of diffusers, whose latents and text embeddings are given."""

    positions = None
    peft_type = None
    has_mask = False
    has_equal_layers = False
    image_options = ("image_size",)
    # Of `ModelOptions`: values for a denoiser, where there are fewer than for transformers' models.
    only: ClassVar = {"quantize": ("none",), "attention": ("auto", "sdpa"), "loss": ("full",), "engine": ("ddp",)}

    def class_name(self, config: Any) -> str | None:
        return config.class_name if isinstance(config, DenoiserConfig) else None

    def lora_targets(self, config: Any) -> str:
        return _family(config).lora_targets

    def build(self, config: Any, source: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        model: nn.Module = config.build(source, dtype)
        return model

    def checkpoint(self, model: Any) -> None:
        model.enable_gradient_checkpointing()

    def describe(self, config: Any, sample: Sample) -> str:
        height, width = _latent_size(config, sample)
        tokens = _family(config).num_text_tokens
        text = f" and embeddings of {tokens} text tokens" if tokens else ""
        return f"alone, on given latents of {height * _PIXELS}x{width * _PIXELS} images{text}"

    def batch(self, config: Any, num_samples: int, sample: Sample) -> dict[str, Tensor]:
        """Return latents `(num_samples, channels, height, width)` and the family's conditions."""
        size = _latent_size(config, sample)
        with default_dtype(sample.dtype):
            latents = torch.zeros(num_samples, latent_channels(config), *size)
            return {"latents": latents} | _family(config).conditions(config, num_samples, size)

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        family = _family_of(model)
        conditions = dict(inputs)
        latents = conditions.pop("latents")
        noise = torch.randn_like(latents)
        if family.flow:
            return _flow_matching(model, family, latents, noise, conditions)
        from diffusers import DDPMScheduler

        times = torch.randint(0, _TIMES, (latents.shape[0],), device=latents.device)
        noisy = DDPMScheduler().add_noise(latents, noise, times)
        prediction = family.predict(model, noisy, times, conditions)
        return nn.functional.mse_loss(prediction.float(), noise.float())


def _flow_matching(
    model: nn.Module, family: DenoiserFamily, latents: Tensor, noise: Tensor, conditions: dict[str, Tensor]
) -> Tensor:
    times = torch.rand(latents.shape[0], device=latents.device) * _TIMES
    sigmas = (times / _TIMES).to(latents.dtype)[:, None, None, None]
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    prediction = family.predict(model, noisy, times, conditions)
    weights = torch.ones_like(sigmas)
    target = noise - latents
    errors = (weights.float() * (prediction.float() - target.float()) ** 2).reshape(target.shape[0], -1)
    return torch.mean(errors, 1).mean()


def _family_of(model: Any) -> DenoiserFamily:
    """Return the family of a model, which may lie in others' wrappers."""
    return next(FAMILIES[type(each).__name__] for each in model.modules() if type(each).__name__ in FAMILIES)


def _family(config: DenoiserConfig) -> DenoiserFamily:
    if config.class_name not in FAMILIES:
        raise ValueError(
            f"task='denoising': what {config.class_name} takes beside latents is not known, as it is for "
            f"{', '.join(FAMILIES)}; write setup and step yourself and call "
            "hf_memopt.estimate_peak_memory"
        )
    return FAMILIES[config.class_name]


def _latent_size(config: DenoiserConfig, sample: Sample) -> tuple[int, int]:
    _family(config)
    own = getattr(config, "sample_size", None)
    if sample.image_size is not None:
        return _checked_size(config, *sample.image_size)
    if own is None:
        raise ValueError(
            f"image_size=None: the configuration of {config.class_name} does not say how large images are; give "
            "image_size, their height and width, such as 1024 or 768x1024"
        )
    return (own[0], own[1]) if isinstance(own, list | tuple) else (own, own)


def _checked_size(config: DenoiserConfig, height: int, width: int) -> tuple[int, int]:
    # UNets halve their inputs a few times, transformers cut them into patches of 2 by 2.
    unit = _PIXELS * (2 ** (len(config.down_block_types) - 1) if hasattr(config, "down_block_types") else 2)
    if height % unit or width % unit:
        raise ValueError(f"image_size={height}x{width}: sides must be multiples of {unit} for {config.class_name}")
    if _family(config).is_square and height != width:
        raise ValueError(f"image_size={height}x{width}: {config.class_name} takes square images alone")
    return height // _PIXELS, width // _PIXELS
