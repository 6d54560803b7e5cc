"""Configurations of diffusers' denoisers: found in a pipeline's folder, on the hub, or in a file."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memopt.planning.models.hub import downloaded, read_object
from hf_memopt.planning.models.quiet import building

PIPELINE = "model_index.json"
# Where pipelines keep the denoiser.
_PARTS = ("unet", "transformer")
_CLASS = "_class_name"


@dataclass(frozen=True)
class DenoiserConfig:
    class_name: str
    values: dict[str, Any]

    @property
    def model_type(self) -> str:
        return self.class_name

    @property
    def architectures(self) -> list[str]:
        return [self.class_name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def build(self, source: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
        from transformers.modeling_utils import local_torch_dtype

        with building(source, "diffusers"), local_torch_dtype(dtype):
            model: nn.Module = _class(self.class_name).from_config(self.values | changes)
        for name, parameter in model.named_parameters():
            if kept_in_float32(model, name):
                parameter.data = parameter.data.float()
        return model


def kept_in_float32(model: nn.Module, name: str) -> bool:
    """Return whether diffusers loads the part of a model with this name in float32 and never quantises it."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(each in name.split(".") for each in kept)


def find_denoiser(model: str) -> DenoiserConfig | None:
    """Return the configuration in a file, a folder of it or of its pipeline, or a pipeline on the hub."""
    for path in _candidates(model):
        values = read_object(path)
        if values is not None and _CLASS in values:
            return _checked(model, values)
    return None


def _candidates(model: str) -> list[Path]:
    place = Path(model)
    if place.exists():
        names = ["config.json", *(f"{part}/config.json" for part in _PARTS)]
        return [place] if place.is_file() else [place / name for name in names]
    index = downloaded(model, PIPELINE)
    if index is None:
        return []
    parts = [part for part in _PARTS if part in (read_object(index) or {})]
    found = [downloaded(model, f"{part}/config.json") for part in parts]
    return [path for path in found if path is not None]


def _checked(model: str, values: dict[str, Any]) -> DenoiserConfig:
    name = values[_CLASS]
    try:
        found = _class(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model={model!r} is of diffusers, which is not installed: pip install 'hf_memopt[diffusers]'"
        ) from error
    except AttributeError as error:
        raise ValueError(f"model={model!r}: diffusers has no class {name!r}; update it") from error
    own, _, _ = found.extract_init_dict(values)
    parameters = inspect.signature(found.__init__).parameters
    defaults = {key: each.default for key, each in parameters.items() if each.default is not each.empty}
    return DenoiserConfig(name, defaults | own)


def _class(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)
