"""The task of a denoiser: it predicts the noise in latents, or the velocity to them, as diffusers' scripts train it."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_memopt.jobs.diffusers_models import training_script
from hf_memopt.jobs.diffusers_models.denoiser_config import DenoiserConfig, default_dtype, kept_in_float32
from hf_memopt.jobs.diffusers_models.denoiser_families import family_of, family_of_model
from hf_memopt.jobs.diffusers_models.denoiser_sizes import image_size, num_frames, num_text_tokens, sizes_of
from hf_memopt.jobs.quiet import quiet
from hf_memopt.jobs.transformers_models.model_batches import Sample

_ENCODERS = {
    "off": "alone, on given latents of",
    "vae": "beside its VAE, on",
    "device": "beside its VAE and text encoders, on",
}
_QUANTISED = ("none", "nf4", "nf4-double", "int8", "int8-torchao")


class Denoising:
    """`Task` for models of diffusers, whose latents and text embeddings are given, or made by encoders beside them."""

    positions = None
    peft_type = None
    has_mask = False
    image_options = ("image_size", "text_tokens", "num_frames", "encoders")
    # Of `ModelOptions`: values for a denoiser, where there are fewer than for transformers' models.
    only: ClassVar = {"quantize": _QUANTISED, "attention": ("auto", "sdpa"), "loss": ("full",), "engine": ("ddp",)}
    script_flags = staticmethod(training_script.script_flags)
    write_files = staticmethod(training_script.write_files)

    def script_of(self, chosen: Mapping[str, Any]) -> str:
        return "train.py"

    def class_name(self, config: Any) -> str | None:
        return config.class_name if isinstance(config, DenoiserConfig) else None

    def lora_targets(self, config: Any) -> str:
        return family_of(config).lora_targets(config)

    def build(self, config: Any, source: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        model: nn.Module = config.build(source, dtype, **family_of(config).settings)
        return model

    def quantises(self, model: nn.Module) -> Callable[[str], bool]:
        """Return whether diffusers quantises the linear layer of a name: all, but for those that stay in float32."""
        return lambda name: not kept_in_float32(model, name)

    def checkpoint(self, model: Any, use_reentrant: bool = False) -> None:
        if use_reentrant:
            raise ValueError("checkpointing='reentrant': diffusers' models have torch's newer kind alone; use 'full'")
        model.enable_gradient_checkpointing()

    def describe(self, config: Any, sample: Sample) -> str:
        family_of(config).check(config)
        height, width = image_size(config, sample)
        frames = num_frames(config, sample)
        kind = f"videos of {frames} frames" if frames else "images"
        tokens = num_text_tokens(config, sample)
        embedded = "" if sample.encoders == "device" else "embeddings of "
        text = f" and {embedded}{tokens} text tokens" if tokens else ""
        return f"{_ENCODERS[sample.encoders]} {height}x{width} {kind}{text}"

    def batch(self, config: Any, num_samples: int, sample: Sample) -> dict[str, Tensor]:
        """Return latents `(num_samples, channels, height, width)`, or with frames before height, and conditions."""
        family = family_of(config)
        sizes = sizes_of(config, num_samples, sample)
        grid = sizes[2:] if family.frames else sizes[3:]
        with default_dtype(sample.dtype):
            latents = torch.zeros(num_samples, family.channels(config), *grid)
            return {"latents": latents} | family.conditions(config, sizes)

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        family = family_of_model(model)
        conditions = dict(inputs)
        latents = conditions.pop("latents")
        with quiet():  # torch says which norms of mixed types it does not fuse
            return family.loss(lambda noisy, times: family.predict(model, noisy, times, conditions), latents)
