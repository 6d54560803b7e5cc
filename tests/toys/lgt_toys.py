"""Tiny configurations and models of the LGT recipe."""

from typing import Any

import torch

from hf_memopt.recipes.common.flags import as_words
from hf_memopt.recipes.lgt.data import Batch, make_batch
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.recipes.lgt.options import Options, parse
from hf_memopt.recipes.lgt.step import build_model

TINY = {
    "model.base_channels": 8,
    "model.style_dim": 8,
    "model.time_dim": 8,
    "model.num_encoder_blocks": 1,
    "model.num_decoder_blocks": 1,
    "loss.num_projections": 16,
    "training.batch_size": 8,
    "training.ode_integration_steps": 3,
    "data.latent_size": 8,
    "data.num_generated": 20,
}


def tiny(**values: Any) -> Options:
    """Return a configuration that a CPU trains at once; fields are given as `section__field`."""
    given = TINY | {name.replace("__", "."): value for name, value in values.items()}
    return parse("", [word for name, value in given.items() for word in as_words(name, value)])


def trained_model(config: Options, dtype: torch.dtype = torch.float32) -> LatentTransfer:
    """Return a model without zero layers: at first nearly all gradients are zero, and any two are equal."""
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


def random_batch(config: Options, dtype: torch.dtype = torch.float32) -> Batch:
    """Return the same batch in every call; every third sample has no style."""
    torch.manual_seed(1)
    batch = make_batch(config, "cpu")
    batch["dropped"] = torch.arange(len(batch["dropped"])) % 3 == 0
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return and clear all gradients, as one vector."""
    vector = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return vector
