"""Pipelines of diffusers, in a folder or on the hub: the denoiser that trains, the sizes of samples, and its encoders.

The VAE and the text encoders are frozen, on the device beside the denoiser. Sizes are as a run, or else the
configuration or script says.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.planning.models.denoiser_families import FAMILIES
from hf_memopt.planning.models.denoiser_family import DenoiserFamily, Sizes
from hf_memopt.planning.models.hub import downloaded, read_object
from hf_memopt.planning.models.hub_code import check_code
from hf_memopt.planning.models.model_batches import OWN_STEP, Sample, pair
from hf_memopt.planning.models.quiet import building

PIPELINE = "model_index.json"
# Where pipelines keep the denoiser.
_PARTS = ("unet", "transformer")
_CLASS = "_class_name"
_VAE = "vae"
_TEXT_ENCODER = re.compile(r"text_encoder(_\d)?")
# These take images as videos of one frame.
_OF_VIDEOS = ("AutoencoderKLCogVideoX", "AutoencoderKLLTXVideo", "AutoencoderKLQwenImage", "AutoencoderKLWan")
# CLIP's texts are padded to its positions; others' layers are read from inside, but for T5's.
_CLIP, _T5 = "clip", ("t5", "umt5")


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
        with building(source, "diffusers"):
            model = _from_config(self.class_name, self.values | changes, dtype)
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


def _from_config(class_name: str, values: Any, dtype: torch.dtype) -> nn.Module:
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(dtype):
        model: nn.Module = _class(class_name).from_config(values)
    return model


# --------------------------------------------------------------------------------------------------- sizes of samples


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


# ----------------------------------------------------------------------------------------------------------- encoders


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder of a pipeline, from diffusers or from transformers, and the path of its config.json."""

    library: str
    class_name: str
    path: Path

    @property
    def is_vae(self) -> bool:
        return self.library == "diffusers"

    def build(self, dtype: torch.dtype) -> nn.Module:
        if self.is_vae:
            model = _from_config(self.class_name, read_object(self.path), dtype)
        else:
            import transformers

            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            check_code(config, str(self.path))
            model = getattr(transformers, self.class_name)._from_config(config, dtype=dtype)
        return model.requires_grad_(False).eval()


class PipelineEncoders:
    """Encoders on the device, with pixels and tokens for them."""

    def __init__(
        self, configs: tuple[EncoderConfig, ...], denoiser: DenoiserConfig, num_samples: int, sample: Sample
    ) -> None:
        in_float32 = family_of(denoiser).vae_in_float32(denoiser)
        vae = next(each for each in configs if each.is_vae)
        self._vae: Any = vae.build(torch.float32 if in_float32 else sample.dtype)
        self._pixels = torch.zeros(_size_of_pixels(vae, denoiser, num_samples, sample))
        self._texts: list[Any] = [each.build(sample.dtype) for each in configs if not each.is_vae]
        self._tokens = [_tokens(each.config, denoiser, num_samples, sample) for each in self._texts]

    @torch.no_grad()
    def run(self) -> None:
        """Encode pixels and texts, as the scripts do in each step; the denoiser has its inputs already."""
        encoded = self._vae.encode(self._pixels.to(self._vae.dtype))
        if hasattr(encoded, "latent_dist"):
            encoded.latent_dist.sample()
        for encoder, tokens in zip(self._texts, self._tokens, strict=True):
            options = {} if encoder.config.model_type in _T5 else {"output_hidden_states": True}
            encoder(input_ids=tokens, **options)


def read_encoders(model: str, which: str) -> tuple[EncoderConfig, ...]:
    """Return the encoders of a pipeline; `which` is "vae", "device" or "off"."""
    if which == "off":
        return ()
    found = tuple(_encoders(model, which))
    if not any(each.is_vae for each in found):
        raise ValueError(
            f"encoders={which!r}: {model!r} has no {PIPELINE} that names a VAE; give the folder or hub id of the "
            f"whole pipeline, with {PIPELINE} and the config.json of {_VAE} and text_encoder in it"
        )
    return found


def _encoders(model: str, which: str) -> Iterator[EncoderConfig]:
    index = _file(model, PIPELINE)
    for part, named in ((read_object(index) if index else None) or {}).items():
        is_wanted = part == _VAE or (which == "device" and _TEXT_ENCODER.fullmatch(part))
        if not is_wanted or not isinstance(named, list) or named[1] is None:
            continue
        path = _file(model, f"{part}/config.json")
        if path is None:
            raise ValueError(
                f"encoders={which!r}: {model!r} has no {part}/config.json; add it to the pipeline's folder"
            )
        library, class_name = named
        yield EncoderConfig(library, class_name, path)


def _file(model: str, name: str) -> Path | None:
    if not Path(model).exists():
        return downloaded(model, name)
    path = Path(model) / name
    return path if path.is_file() else None


def _size_of_pixels(vae: EncoderConfig, config: DenoiserConfig, num_samples: int, sample: Sample) -> tuple[int, ...]:
    channels = (read_object(vae.path) or {}).get("in_channels", 3)
    frames = num_frames(config, sample) or 1
    depth = (frames,) if vae.class_name in _OF_VIDEOS else ()
    return (num_samples, channels, *depth, *image_size(config, sample))


def _tokens(encoder: Any, config: DenoiserConfig, num_samples: int, sample: Sample) -> Tensor:
    family = family_of(config)
    length = sample.text_tokens or family.text_tokens or family.clip_tokens
    if encoder.model_type.startswith(_CLIP):
        length = encoder.max_position_embeddings
    return torch.zeros(num_samples, length, dtype=torch.long)
