"""Denoisers of videos: CogVideoX by diffusers' training script; Wan and LTX-Video, which have none, by their pipelines.

Source: examples/cogvideo and the pipelines of diffusers, November 2026.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.jobs.diffusers_models.denoiser_family import DenoiserFamily, Inputs, Sizes, check_channels
from hf_memopt.jobs.diffusers_models.denoiser_losses import data_loss

# Of Wan 2.2's 5B model, whose VAE halves each side once more.
_CHANNELS_OF_16_PIXELS = 48
# Frames and pixels of LTX-Video's latents, and the frames in a second of its videos.
_LTX_SCALE, _LTX_RATE = (8, 32, 32), 25
# Of the grid that CogVideoX's positions are relative to: latents of videos of 480x720.
_COGVIDEOX_GRID = (30, 45)


def _of_wan(config: Any, sizes: Sizes) -> Inputs:
    return {"encoder_hidden_states": torch.zeros(sizes.num_samples, sizes.num_text, config.text_dim)}


def _wan(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    prediction: Tensor = model(hidden_states=noisy, timestep=time, **conditions, return_dict=False)[0]
    return prediction


def _of_ltx(config: Any, sizes: Sizes) -> Inputs:
    num_samples, num_text = sizes.num_samples, sizes.num_text
    return {
        "encoder_hidden_states": torch.zeros(num_samples, num_text, config.caption_channels),
        "encoder_attention_mask": torch.tensor([[1] * num_text] * num_samples),
    }


def _ltx(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    frames, height, width = noisy.shape[2:]
    rows = noisy.flatten(2).transpose(1, 2)
    scale = (_LTX_SCALE[0] / _LTX_RATE, *_LTX_SCALE[1:])
    sizes: Any = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}
    prediction = model(hidden_states=rows, timestep=time, **conditions, **sizes, return_dict=False)[0]
    video: Tensor = prediction.transpose(1, 2).unflatten(2, (frames, height, width))
    return video


def _of_cogvideox(config: Any, sizes: Sizes) -> Inputs:
    inputs = {"encoder_hidden_states": torch.zeros(sizes.num_samples, sizes.num_text, config.text_embed_dim)}
    if config.use_rotary_positional_embeddings:
        cos, sin = _positions(config, sizes)
        inputs |= {"cos": cos, "sin": sin}
    return inputs


def _check_cogvideox(config: Any) -> None:
    check_channels(config)
    if config.patch_size_t is not None:
        raise ValueError(
            f"task='denoising': this CogVideoXTransformer3DModel has patch_size_t={config.patch_size_t}: diffusers' "
            "script trains those of CogVideoX 1.0; name one of these, such as THUDM/CogVideoX-2b"
        )


def _positions(config: Any, sizes: Sizes) -> tuple[Tensor, Tensor]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid = (sizes.height // config.patch_size, sizes.width // config.patch_size)
    found: tuple[Tensor, Tensor] = get_3d_rotary_pos_embed(
        config.attention_head_dim, ((0, 0), _COGVIDEOX_GRID), grid, sizes.frames
    )
    cos, sin = found
    return cos.float(), sin.float()


def _cogvideox(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    others = dict(conditions)
    positions: Any = (others.pop("cos"), others.pop("sin")) if "cos" in others else None
    frames_first = noisy.transpose(1, 2)
    prediction: Tensor = model(
        hidden_states=frames_first, timestep=time, image_rotary_emb=positions, **others, return_dict=False
    )[0]
    return prediction.transpose(1, 2)


VIDEOS = {
    "WanTransformer3DModel": DenoiserFamily(
        conditions=_of_wan,
        predict=_wan,
        text_tokens=512,
        pixels=lambda config: 16 if config.in_channels == _CHANNELS_OF_16_PIXELS else 8,
        frames=4,
    ),
    "LTXVideoTransformer3DModel": DenoiserFamily(
        conditions=_of_ltx, predict=_ltx, text_tokens=128, pixels=lambda config: _LTX_SCALE[1], patch=1, frames=8
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
