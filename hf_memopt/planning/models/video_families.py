"""Denoisers of videos: CogVideoX by diffusers' training script; Wan and LTX-Video, which have none, by their pipelines.

Source: examples/cogvideo and the pipelines of diffusers, November 2026.
"""

from typing import Any

from torch import Tensor, nn

from hf_memopt.planning.models.denoiser_family import (
    DenoiserFamily,
    Inputs,
    Sizes,
    check_channels,
    data_loss,
    masked_text,
    plain_prediction,
    text_alone,
)

# Of Wan 2.2's 5B model, whose VAE halves each side once more.
_CHANNELS_OF_16_PIXELS = 48
# Frames and pixels of LTX-Video's latents, and the frames in a second of its videos.
_LTX_SCALE, _LTX_RATE = (8, 32, 32), 25
# Of the grid that CogVideoX's positions are relative to: latents of videos of 480x720.
_COGVIDEOX_GRID = (30, 45)


def _ltx(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    frames, height, width = noisy.shape[2:]
    rows = noisy.flatten(2).transpose(1, 2)
    scale = (_LTX_SCALE[0] / _LTX_RATE, *_LTX_SCALE[1:])
    sizes: Any = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}
    prediction: Any = plain_prediction(model, rows, time, conditions | sizes)
    video: Tensor = prediction.transpose(1, 2).unflatten(2, (frames, height, width))
    return video


def _of_cogvideox(config: Any, sizes: Sizes) -> Inputs:
    inputs = text_alone("text_embed_dim")(config, sizes)
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
    cos, sin = get_3d_rotary_pos_embed(config.attention_head_dim, ((0, 0), _COGVIDEOX_GRID), grid, sizes.frames)
    return cos.float(), sin.float()


def _cogvideox(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    others = dict(conditions)
    positions: Any = (others.pop("cos"), others.pop("sin")) if "cos" in others else None
    frames_first = noisy.transpose(1, 2)
    prediction = plain_prediction(model, frames_first, time, others | {"image_rotary_emb": positions})
    return prediction.transpose(1, 2)


VIDEOS = {
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
