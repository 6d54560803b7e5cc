"""Configurations of diffusers' denoisers, in a pipeline's folder, on the hub, or in a file; and the sizes of samples.

Sizes are as a run, or else the configuration or script says.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memopt.planning.models.denoiser_families import FAMILIES
from hf_memopt.planning.models.denoiser_family import DenoiserFamily, Sizes
from hf_memopt.planning.models.hub import downloaded, read_object
from hf_memopt.planning.models.model_batches import OWN_STEP, Sample, pair
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


def family_of(config: Any) -> DenoiserFamily:
    if config.class_name not in FAMILIES:
        raise ValueError(
            f"task='denoising': what {config.class_name} takes beside latents is not known, as it is for "
            f"{', '.join(FAMILIES)}; {OWN_STEP}"
        )
    return FAMILIES[config.class_name]


def family_of_model(model: Any) -> DenoiserFamily:
    """Return the family of a model, which may lie in others' wrappers."""
    return next(FAMILIES[type(each).__name__] for each in model.modules() if type(each).__name__ in FAMILIES)


def sizes_of(config: DenoiserConfig, num_samples: int, sample: Sample) -> Sizes:
    family = family_of(config)
    height, width = image_size(config, sample)
    frames = num_frames(config, sample)
    pixels = family.pixels(config)
    latent_frames = (frames - 1) // family.frames + 1 if frames else 1
    return Sizes(num_samples, num_text_tokens(config, sample), latent_frames, height // pixels, width // pixels)


def num_text_tokens(config: DenoiserConfig, sample: Sample) -> int:
    family = family_of(config)
    if sample.text_tokens is None:
        return family.clip_tokens + family.text_tokens
    if not family.text_tokens:
        number = f"always {family.clip_tokens}" if family.clip_tokens else "none"
        raise ValueError(
            f"text_tokens={sample.text_tokens}: text tokens of {config.class_name} are {number}; leave it out"
        )
    return family.clip_tokens + sample.text_tokens


def num_frames(config: DenoiserConfig, sample: Sample) -> int:
    """Return the frames of a video; 0, samples are images."""
    step = family_of(config).frames
    if not step:
        if sample.num_frames is not None:
            raise ValueError(f"num_frames={sample.num_frames}: {config.class_name} learns images; leave it out")
        return 0
    frames = sample.num_frames or getattr(config, "sample_frames", None)
    if frames is None:
        raise ValueError(
            f"num_frames=None: the configuration of {config.class_name} does not say how long videos are; give "
            f"num_frames, a multiple of {step} and one more, such as {10 * step + 1}"
        )
    if frames % step != 1:
        raise ValueError(
            f"num_frames={frames}: {config.class_name} takes a multiple of {step} and one more; use "
            f"{(frames - 1) // step * step + 1}"
        )
    return int(frames)


def image_size(config: DenoiserConfig, sample: Sample) -> tuple[int, int]:
    """Return height and width in pixels."""
    if sample.image_size is not None:
        return _checked_size(config, *sample.image_size)
    own = _own_size(config)
    if own is None:
        raise ValueError(
            f"image_size=None: the configuration of {config.class_name} does not say how large images are; give "
            "image_size, their height and width, such as 1024 or 768x1024"
        )
    pixels = family_of(config).pixels(config)
    return own[0] * pixels, own[1] * pixels


def _own_size(config: DenoiserConfig) -> tuple[int, int] | None:
    if hasattr(config, "sample_height"):
        return config.sample_height, config.sample_width
    own = getattr(config, "sample_size", None)
    return None if own is None else pair(own)


def _checked_size(config: DenoiserConfig, height: int, width: int) -> tuple[int, int]:
    family = family_of(config)
    # UNets halve their inputs a few times, transformers cut them into patches.
    patch = 2 ** (len(config.down_block_types) - 1) if hasattr(config, "down_block_types") else family.patch
    unit = family.pixels(config) * patch
    if height % unit or width % unit:
        raise ValueError(f"image_size={height}x{width}: sides must be multiples of {unit} for {config.class_name}")
    if family.is_square and height != width:
        raise ValueError(f"image_size={height}x{width}: {config.class_name} takes square images alone")
    return height, width
