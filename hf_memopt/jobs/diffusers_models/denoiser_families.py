"""The inputs of each class of denoisers, by the scripts that train it.

Source: examples/text_to_image and examples/dreambooth of diffusers, August 2026.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Size = tuple[int, int]  # height and width

_ATTENTION = "to_q,to_k,to_v,to_out.0"
_JOINT_ATTENTION = (
    "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,attn.add_q_proj,attn.add_k_proj,attn.add_v_proj,attn.to_add_out"
)
_FLUX_LAYERS = f"{_JOINT_ATTENTION},ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2"


@dataclass(frozen=True)
class DenoiserFamily:
    """A class of denoisers.

    Attributes:
        conditions: from configuration, number of samples and size of the latents: inputs beside latents and time.
        num_text_tokens: number of text tokens of these conditions.
        lora_targets: layers that the scripts adapt.
        flow: it learns velocities from noise to data, with a time in float32; else noise, with a whole number.
        predict: from model, noisy latents, time and conditions: a prediction of the latents' size.
        is_square: it takes square images alone.
    """

    conditions: Callable[[Any, int, Size], Inputs]
    num_text_tokens: int
    lora_targets: str
    flow: bool
    predict: Callable[[nn.Module, Tensor, Tensor, Inputs], Tensor]
    is_square: bool = False


def latent_channels(config: Any) -> int:
    packed = config.class_name == "FluxTransformer2DModel"
    return int(config.in_channels) // (_PACKED if packed else 1)


# --------------------------------------------------------------------------------------------------- conditions


def _of_unet(config: Any, num_samples: int, size: Size) -> Inputs:
    width = config.cross_attention_dim
    inputs = {"encoder_hidden_states": torch.zeros(num_samples, 77, max(width) if isinstance(width, list) else width)}
    if config.addition_embed_type == "text_time":
        num_text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs |= {"text_embeds": torch.zeros(num_samples, num_text), "time_ids": torch.zeros(num_samples, 6)}
    return inputs


def _of_joint_attention(config: Any, num_samples: int, size: Size) -> Inputs:
    return {
        "encoder_hidden_states": torch.zeros(num_samples, 77 + 77, config.joint_attention_dim),
        "pooled_projections": torch.zeros(num_samples, config.pooled_projection_dim),
    }


def _of_flux(config: Any, num_samples: int, size: Size) -> Inputs:
    inputs = {
        "encoder_hidden_states": torch.zeros(num_samples, 512, config.joint_attention_dim),
        "pooled_projections": torch.zeros(num_samples, config.pooled_projection_dim),
        "txt_ids": torch.zeros(512, 3),
        "img_ids": torch.zeros((size[0] // 2) * (size[1] // 2), 3),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.ones(num_samples)
    return inputs


def _of_pixart(config: Any, num_samples: int, size: Size) -> Inputs:
    inputs = {
        "encoder_hidden_states": torch.zeros(num_samples, 120, config.caption_channels),
        "encoder_attention_mask": torch.ones(num_samples, 120),
    }
    if config.use_additional_conditions or (config.use_additional_conditions is None and config.sample_size == 128):
        inputs |= {"resolution": torch.zeros(num_samples, 2), "aspect_ratio": torch.zeros(num_samples, 1)}
    return inputs


def _of_dit(config: Any, num_samples: int, size: Size) -> Inputs:
    return {"class_labels": torch.zeros(num_samples, dtype=torch.long)}


# --------------------------------------------------------------------------------------------------- predictions


def _unet(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    text = conditions["encoder_hidden_states"]
    added = {name: value for name, value in conditions.items() if value is not text}
    prediction: Tensor = model(noisy, time, text, added_cond_kwargs=added, return_dict=False)[0]
    return prediction


def _joint_attention(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    prediction: Tensor = model(hidden_states=noisy, timestep=time, **conditions, return_dict=False)[0]
    return prediction


# Flux takes squares of 2 by 2 latents as one.
_PACKED = 4


def _flux(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    num_samples, channels, height, width = noisy.shape
    packed = noisy.view(num_samples, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    packed = packed.reshape(num_samples, height // 2 * (width // 2), channels * _PACKED)
    prediction = model(hidden_states=packed, timestep=time / 1000, **conditions, return_dict=False)[0]
    squares = prediction.view(num_samples, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    unpacked: Tensor = squares.reshape(num_samples, channels, height, width)
    return unpacked


def _with_variance(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    sizes = {name: value for name, value in conditions.items() if name in ("resolution", "aspect_ratio")}
    others: dict[str, Any] = {name: value for name, value in conditions.items() if name not in sizes}
    if "encoder_hidden_states" in conditions:
        others["added_cond_kwargs"] = sizes or {"resolution": None, "aspect_ratio": None}
    prediction: Tensor = model(noisy, timestep=time, **others, return_dict=False)[0]
    return prediction.chunk(2, dim=1)[0] if prediction.shape[1] == 2 * noisy.shape[1] else prediction


FAMILIES = {
    "UNet2DConditionModel": DenoiserFamily(_of_unet, 77, _ATTENTION, False, _unet),
    "SD3Transformer2DModel": DenoiserFamily(_of_joint_attention, 77 + 77, _JOINT_ATTENTION, True, _joint_attention),
    "FluxTransformer2DModel": DenoiserFamily(_of_flux, 512, _FLUX_LAYERS, True, _flux),
    "PixArtTransformer2DModel": DenoiserFamily(_of_pixart, 120, _ATTENTION, False, _with_variance),
    "DiTTransformer2DModel": DenoiserFamily(_of_dit, 0, _ATTENTION, False, _with_variance, is_square=True),
}
