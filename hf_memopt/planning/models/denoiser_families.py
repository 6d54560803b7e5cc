"""The classes of denoisers that are simulated: by diffusers' training scripts, or, where it has none, by its pipelines.

Source: examples/text_to_image, examples/dreambooth and examples/cogvideo of diffusers, and the pipelines of AuraFlow,
PixArt, DiT, Wan and LTX-Video, November 2026.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.planning.models.denoiser_family import (
    TIMES,
    DenoiserFamily,
    Inputs,
    Sizes,
    attention_layers,
    check_channels,
    check_nothing,
    data_loss,
    masked_text,
    noise_loss,
    plain_prediction,
    text_alone,
)

_JOINT_ATTENTION = (
    "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,attn.add_q_proj,attn.add_k_proj,attn.add_v_proj,attn.to_add_out"
)
_FLUX_LAYERS = f"{_JOINT_ATTENTION},ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2"
_SIZED = frozenset({"resolution"})
_CACHED = _SIZED | {"cache_latents", "max_sequence_length", "lora_layers"}
_QUANTISED = _CACHED | {"bnb_quantization_config_path"}
# Flux and Qwen-Image take squares of 2 by 2 latents as one.
_PACKED = 4
# Of Wan 2.2's 5B model, whose VAE halves each side once more.
_CHANNELS_OF_16_PIXELS = 48
# Frames and pixels of LTX-Video's latents, and the frames in a second of its videos.
_LTX_SCALE, _LTX_RATE = (8, 32, 32), 25
# Of the grid that CogVideoX's positions are relative to: latents of videos of 480x720.
_COGVIDEOX_GRID = (30, 45)


def _packed_channels(config: Any) -> int:
    return int(config.in_channels) // _PACKED


def _flux2_layers(config: Any) -> str:
    single = (f"single_transformer_blocks.{number}.attn.to_out" for number in range(config.num_single_layers))
    return ",".join([attention_layers(config), "to_qkv_mlp_proj", *single])


def _is_of_sdxl(config: Any) -> bool:
    return bool(config.addition_embed_type == "text_time")


# --------------------------------------------------------------------------------------------------- conditions


def _of_unet(config: Any, sizes: Sizes) -> Inputs:
    width = config.cross_attention_dim
    text = (sizes.num_samples, sizes.num_text, max(width) if isinstance(width, list) else width)
    inputs = {"encoder_hidden_states": torch.zeros(text)}
    if _is_of_sdxl(config):
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs |= {"text_embeds": torch.zeros(sizes.num_samples, pooled), "time_ids": torch.zeros(sizes.num_samples, 6)}
    return inputs


def _of_joint_attention(config: Any, sizes: Sizes) -> Inputs:
    pooled = torch.zeros(sizes.num_samples, config.pooled_projection_dim)
    return text_alone("joint_attention_dim")(config, sizes) | {"pooled_projections": pooled}


def _of_flux(config: Any, sizes: Sizes) -> Inputs:
    inputs = _of_joint_attention(config, sizes) | {
        "txt_ids": torch.zeros(sizes.num_text, 3),
        "img_ids": torch.zeros((sizes.height // 2) * (sizes.width // 2), 3),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.ones(sizes.num_samples)
    return inputs


def _of_flux2(config: Any, sizes: Sizes) -> Inputs:
    num_samples, num_text, num_latents = sizes.num_samples, sizes.num_text, sizes.height * sizes.width
    inputs = text_alone("joint_attention_dim")(config, sizes) | {
        "txt_ids": torch.zeros(num_samples, num_text, 4, dtype=torch.long),
        "img_ids": torch.zeros(num_samples, num_latents, 4, dtype=torch.long),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.ones(num_samples)
    return inputs


def _of_hidream(config: Any, sizes: Sizes) -> Inputs:
    num_samples, num_text = sizes.num_samples, sizes.num_text
    t5, llama = config.caption_channels
    return {
        "encoder_hidden_states_t5": torch.zeros(num_samples, num_text, t5),
        "encoder_hidden_states_llama3": torch.zeros(max(config.llama_layers) + 1, num_samples, num_text, llama),
        "pooled_embeds": torch.zeros(num_samples, config.text_emb_dim),
    }


def _of_pixart(config: Any, sizes: Sizes) -> Inputs:
    inputs = masked_text("caption_channels")(config, sizes)
    if config.use_additional_conditions or (config.use_additional_conditions is None and config.sample_size == 128):
        num_samples = sizes.num_samples
        inputs |= {"resolution": torch.zeros(num_samples, 2), "aspect_ratio": torch.zeros(num_samples, 1)}
    return inputs


def _of_dit(config: Any, sizes: Sizes) -> Inputs:
    return {"class_labels": torch.zeros(sizes.num_samples, dtype=torch.long)}


# --------------------------------------------------------------------------------------------------- predictions


def _unet(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    text = conditions["encoder_hidden_states"]
    added = {name: value for name, value in conditions.items() if value is not text}
    prediction: Tensor = model(noisy, time, text, added_cond_kwargs=added, return_dict=False)[0]
    return prediction


def _scaled_time(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    return plain_prediction(model, noisy, time / TIMES, conditions)


def _reversed_flow(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    return -plain_prediction(model, noisy, (TIMES - time) / TIMES, conditions)


def _of_list(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    images, texts = (list(each.unbind(0)) for each in (noisy.unsqueeze(2), conditions["encoder_hidden_states"]))
    predictions = model(images, (TIMES - time) / TIMES, texts, return_dict=False)[0]
    return -torch.stack(predictions, dim=0).squeeze(2)


def _hidream(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    prediction: Tensor = model(hidden_states=noisy, timesteps=time, **conditions, return_dict=False)[0]
    return prediction * -1


def _in_squares(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    num_samples, channels, height, width = noisy.shape
    packed = noisy.view(num_samples, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    packed = packed.reshape(num_samples, height // 2 * (width // 2), channels * _PACKED)
    prediction = _scaled_time(model, packed, time, conditions)
    squares = prediction.view(num_samples, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(num_samples, channels, height, width)


def _qwen_image(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    shape: Any = [(1, noisy.shape[2] // 2, noisy.shape[3] // 2)] * noisy.shape[0]
    return _in_squares(model, noisy, time, conditions | {"img_shapes": shape})


def _in_rows(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    num_samples, channels, height, width = noisy.shape
    packed = noisy.reshape(num_samples, channels, height * width).permute(0, 2, 1)
    rows = _scaled_time(model, packed, time, conditions)
    places = torch.arange(height * width, device=rows.device).unsqueeze(1).expand(-1, channels)
    images = [torch.zeros_like(each).scatter_(0, places, each) for each in rows]
    return torch.stack([each.view(height, width, channels).permute(2, 0, 1) for each in images])


def _with_variance(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    sizes = {name: value for name, value in conditions.items() if name in ("resolution", "aspect_ratio")}
    others: dict[str, Any] = {name: value for name, value in conditions.items() if name not in sizes}
    if "encoder_hidden_states" in conditions:
        others["added_cond_kwargs"] = sizes or {"resolution": None, "aspect_ratio": None}
    prediction: Tensor = model(noisy, timestep=time, **others, return_dict=False)[0]
    return prediction.chunk(2, dim=1)[0] if prediction.shape[1] == 2 * noisy.shape[1] else prediction


# --------------------------------------------------------------------------------------------------- videos


def _ltx(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    frames, height, width = noisy.shape[2:]
    rows = noisy.flatten(2).transpose(1, 2)
    scale = (_LTX_SCALE[0] / _LTX_RATE, *_LTX_SCALE[1:])
    sizes: Any = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}
    prediction: Any = plain_prediction(model, rows, time, conditions | sizes)
    video: Tensor = prediction.transpose(1, 2).unflatten(2, (frames, height, width))
    return video


def _of_cogvideox(config: Any, sizes: Sizes) -> Inputs:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    inputs = text_alone("text_embed_dim")(config, sizes)
    if config.use_rotary_positional_embeddings:
        grid = (sizes.height // config.patch_size, sizes.width // config.patch_size)
        cos, sin = get_3d_rotary_pos_embed(config.attention_head_dim, ((0, 0), _COGVIDEOX_GRID), grid, sizes.frames)
        inputs |= {"cos": cos.float(), "sin": sin.float()}
    return inputs


def _check_cogvideox(config: Any) -> None:
    check_channels(config)
    if config.patch_size_t is not None:
        raise ValueError(
            f"task='denoising': this CogVideoXTransformer3DModel has patch_size_t={config.patch_size_t}: diffusers' "
            "script trains those of CogVideoX 1.0; name one of these, such as THUDM/CogVideoX-2b"
        )


def _cogvideox(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    others = dict(conditions)
    positions: Any = (others.pop("cos"), others.pop("sin")) if "cos" in others else None
    frames_first = noisy.transpose(1, 2)
    prediction = plain_prediction(model, frames_first, time, others | {"image_rotary_emb": positions})
    return prediction.transpose(1, 2)


FAMILIES = {
    "UNet2DConditionModel": DenoiserFamily(
        conditions=_of_unet, predict=_unet, loss=noise_loss, clip_tokens=77, vae_in_float32=_is_of_sdxl, flags=_SIZED
    ),
    "SD3Transformer2DModel": DenoiserFamily(
        conditions=_of_joint_attention,
        lora_targets=lambda config: _JOINT_ATTENTION,
        clip_tokens=77,
        text_tokens=77,
        vae_in_float32=lambda config: True,
        flags=_CACHED,
    ),
    "FluxTransformer2DModel": DenoiserFamily(
        conditions=_of_flux,
        predict=_in_squares,
        lora_targets=lambda config: _FLUX_LAYERS,
        text_tokens=512,
        channels=_packed_channels,
        flags=_CACHED,
    ),
    "Flux2Transformer2DModel": DenoiserFamily(
        conditions=_of_flux2,
        predict=_in_rows,
        lora_targets=_flux2_layers,
        text_tokens=512,
        pixels=lambda config: 16,
        patch=1,
        flags=_QUANTISED,
    ),
    "QwenImageTransformer2DModel": DenoiserFamily(
        conditions=text_alone("joint_attention_dim"),
        predict=_qwen_image,
        check=check_nothing,
        text_tokens=512,
        channels=_packed_channels,
        flags=_QUANTISED,
    ),
    "ZImageTransformer2DModel": DenoiserFamily(
        conditions=text_alone("cap_feat_dim"), predict=_of_list, check=check_nothing, text_tokens=512, flags=_QUANTISED
    ),
    "Lumina2Transformer2DModel": DenoiserFamily(
        conditions=masked_text("cap_feat_dim"),
        predict=_reversed_flow,
        text_tokens=256,
        vae_in_float32=lambda config: True,
        flags=_CACHED,
    ),
    "SanaTransformer2DModel": DenoiserFamily(
        conditions=masked_text("caption_channels"),
        lora_targets=lambda config: "to_q,to_k,to_v",
        text_tokens=300,
        pixels=lambda config: 32,
        patch=1,
        vae_in_float32=lambda config: True,
        flags=_CACHED,
    ),
    "AuraFlowTransformer2DModel": DenoiserFamily(
        conditions=text_alone("joint_attention_dim"), predict=_scaled_time, text_tokens=256
    ),
    "HiDreamImageTransformer2DModel": DenoiserFamily(
        conditions=_of_hidream,
        predict=_hidream,
        lora_targets=lambda config: "to_q,to_k,to_v,to_out",
        text_tokens=128,
        settings={"force_inference_output": True},
        flags=_QUANTISED,
    ),
    "PixArtTransformer2DModel": DenoiserFamily(
        conditions=_of_pixart, predict=_with_variance, loss=noise_loss, check=check_nothing, text_tokens=120
    ),
    "DiTTransformer2DModel": DenoiserFamily(
        conditions=_of_dit, predict=_with_variance, loss=noise_loss, check=check_nothing, is_square=True
    ),
    "WanTransformer3DModel": DenoiserFamily(
        conditions=text_alone("text_dim"),
        text_tokens=512,
        pixels=lambda config: 16 if config.in_channels == _CHANNELS_OF_16_PIXELS else 8,
        frames=4,
    ),
    "LTXVideoTransformer3DModel": DenoiserFamily(
        conditions=masked_text("caption_channels"),
        predict=_ltx,
        text_tokens=128,
        pixels=lambda config: _LTX_SCALE[1],
        patch=1,
        frames=8,
    ),
    "CogVideoXTransformer3DModel": DenoiserFamily(
        conditions=_of_cogvideox,
        predict=_cogvideox,
        loss=data_loss,
        clip_tokens=226,
        check=_check_cogvideox,
        frames=4,
        flags=frozenset({"height", "width", "max_num_frames"}),
    ),
}
