"""neuralop's models as the flags of `train_neural_operator.py` describe them."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO, TFNO, UNO
from neuralop.models.base_model import BaseModel
from torch import Tensor, nn

from hf_memopt.activations import apply_selective_checkpointing
from hf_memopt.recipes.neural_operator.options import ModelOptions


def make_model(options: ModelOptions, in_channels: int = 1, out_channels: int = 1, num_dims: int = 2) -> nn.Module:
    """Return a model of fields on a grid of `num_dims` dimensions. Torch's seed decides the weights."""
    channels = {"in_channels": in_channels, "out_channels": out_channels, "hidden_channels": options.hidden_channels}
    shape = {"n_modes": (options.modes,) * num_dims, "n_layers": options.num_layers}
    if options.model == "fno":
        model: nn.Module = FNO(**channels, **shape)
    elif options.model == "tfno":
        model = TFNO(**channels, **shape, factorization="tucker", rank=options.rank)
    else:
        model = _make_uno(options, channels, num_dims)
    keep_spectral_float32(model)
    if options.checkpointed_modules:
        apply_selective_checkpointing(model, "all", modules=options.checkpointed_modules)
    return model


def _make_uno(options: ModelOptions, channels: dict[str, int], num_dims: int) -> nn.Module:
    """Return one with half the resolution and twice the width between the second layer and the last but one."""
    width, modes, num_inner = options.hidden_channels, options.modes, options.num_layers - 2
    outer, inner = [modes] * num_dims, [modes // 2] * num_dims
    same, halved, doubled = [1] * num_dims, [0.5] * num_dims, [2] * num_dims
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its arguments
        return UNO(
            **channels,
            n_layers=options.num_layers,
            lifting_channels=2 * width,
            projection_channels=2 * width,
            uno_out_channels=[width, *[2 * width] * num_inner, width],
            uno_n_modes=[outer, *[inner] * num_inner, outer],
            uno_scalings=[same, halved, *[same] * (num_inner - 2), doubled, same],
            channel_mlp_skip="linear",  # the default, a gate per channel, cannot change the width
        )


def save_model(model: nn.Module, folder: Path) -> None:
    """Write `model_state_dict.pt`, and beside it the arguments for neuralop's `from_checkpoint`.

    A UNO has no such method: make it by `make_model` and let it load the state dict.
    """
    if isinstance(model, BaseModel):
        model.save_checkpoint(folder, "model")
    else:
        torch.save(model.state_dict(), folder / "model_state_dict.pt")


def keep_spectral_float32(model: nn.Module) -> None:
    """Let spectral convolutions compute in float32 also under autocast: CUDA has no bfloat16 Fourier transform."""
    for module in model.modules():
        if isinstance(module, SpectralConv):
            module.register_forward_pre_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.float() if isinstance(value, Tensor) else value for value in inputs)
