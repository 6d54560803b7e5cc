"""Configurations of transformers models, looked at before anything is built from them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from hf_memopt.jobs.diffusers_models.denoiser_config import find_denoiser
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO

# A layer takes some 50 ms to simulate, and no published model has a tenth as many.
MAX_LAYERS = 1000

_SIZE = re.compile(r"(num|n|d)_\w+|\w+_(size|dim|heads|layers|channels)")
_NEVER_ZERO = re.compile(r"(\w+_)?(hidden_size|vocab_size|head_dim|n_embd|d_model|heads|n_head)")
_LAYERS = re.compile(r"((num|n)_)?((hidden|encoder|decoder)_)?layers?")


def read_config(model: str) -> Any:
    """Find a hub id, a folder, or a config.json, of transformers or of a denoiser."""
    if Path(model).exists() and (denoiser := find_denoiser(model)) is not None:
        return denoiser
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        if not Path(model).exists() and (denoiser := find_denoiser(model)) is not None:
            return denoiser
        raise ValueError(
            f"model={model!r}: no configuration of a transformers model was found or read; pass a folder with "
            f"a config.json, such a file, or a hub id (when offline, one that was downloaded before): {error}"
        ) from error
    source = f"model={model!r}"
    check_sizes(config, source)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{source}: its configuration has a quantization_config, and quantised weights are not simulated; remove "
            "that entry from a copy of its config.json to simulate the weights in dtype"
        )
    return config


def check_sizes(config: PretrainedConfig, source: str) -> None:
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            check_sizes(value, f"{source}: {name}")
        elif isinstance(value, int) and _SIZE.fullmatch(name):
            (COUNT if _NEVER_ZERO.fullmatch(name) else COUNT_OR_ZERO).check(f"{source}: {name}", value)
            if _LAYERS.fullmatch(name) and value > MAX_LAYERS:
                raise ValueError(
                    f"{source}: {name}={value} are more than {MAX_LAYERS} layers, which take too long to simulate; "
                    "use two smaller numbers and extrapolate, since each layer adds the same"
                )


@contextmanager
def building(source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{source}: transformers cannot build a model from this configuration ({type(error).__name__}: {error}); "
            "compare it with the one that was published"
        ) from error
