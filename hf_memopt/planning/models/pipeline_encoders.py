"""The VAE and the text encoders of a diffusers pipeline, frozen on the device beside the denoiser that trains."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.planning.models.denoiser_config import PIPELINE, DenoiserConfig, family_of, image_size, num_frames
from hf_memopt.planning.models.hub import downloaded, read_object
from hf_memopt.planning.models.hub_code import check_code
from hf_memopt.planning.models.model_batches import Sample

_VAE = "vae"
_TEXT_ENCODER = re.compile(r"text_encoder(_\d)?")
# These take images as videos of one frame.
_OF_VIDEOS = ("AutoencoderKLCogVideoX", "AutoencoderKLLTXVideo", "AutoencoderKLQwenImage", "AutoencoderKLWan")
# CLIP's texts are padded to its positions; others' layers are read from inside, but for T5's.
_CLIP, _T5 = "clip", ("t5", "umt5")


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
        model: nn.Module
        if self.is_vae:
            import diffusers
            from transformers.modeling_utils import local_torch_dtype

            with local_torch_dtype(dtype):
                model = getattr(diffusers, self.class_name).from_config(read_object(self.path))
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
