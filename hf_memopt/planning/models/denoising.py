"""The task of a denoiser: it predicts the noise in latents, or the velocity to them, as diffusers' scripts train it."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_memopt.planning.models.model_batches import Sample, parse_image_size
from hf_memopt.planning.models.pipelines import (
    DenoiserConfig,
    family_of,
    family_of_model,
    image_size,
    kept_in_float32,
    num_frames,
    num_text_tokens,
    sizes_of,
)
from hf_memopt.planning.models.quiet import quiet

_ENCODERS = {
    "off": "alone, on given latents of",
    "vae": "beside its VAE, on",
    "device": "beside its VAE and text encoders, on",
}
_QUANTISED = ("none", "nf4", "nf4-double", "int8-llm", "int8-torchao")
# Flags of some scripts, and what `ModelOptions` calls their values.
_BNB_FILE = "bnb_quantization_config_path"
_NAMES = {"max_sequence_length": "text_tokens", "lora_layers": "lora_targets", _BNB_FILE: "quantize"}
# Fields of the BitsAndBytesConfig in the file.
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_LOADED: dict[str, dict[str, Any]] = {
    "nf4": _NF4,
    "nf4-double": {**_NF4, "bnb_4bit_use_double_quant": True},
    "int8-llm": {"load_in_8bit": True},
}
_ADAMW = ("adamw", "adamw-foreach", "adamw-8bit-bnb")


class Denoising:
    """`Task` for models of diffusers, whose latents and text embeddings are given, or made by encoders beside them."""

    positions = None
    peft_type = None
    has_mask = False
    has_own_loss = True
    image_options = ("image_size", "text_tokens", "num_frames", "encoders")
    # Of `ModelOptions`: values for a denoiser, where there are fewer than for transformers' models.
    only: ClassVar = {"quantize": _QUANTISED, "attention": ("auto", "sdpa"), "loss": ("full",), "engine": ("ddp",)}

    def script(self, chosen: Mapping[str, Any], config: Any) -> str:
        """Return diffusers' script with flags for what is chosen, and a remark on what it has no flags for."""
        known = family_of(config).flags
        own = dict(_own_flags(chosen, config))
        flags = {
            "train_batch_size": chosen["micro_batch"],
            "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
            "mixed_precision": chosen["precision"],
            "max_grad_norm": chosen["max_grad_norm"] or 0.0,
        }
        flags |= {} if chosen["lora_rank"] is None else {"rank": chosen["lora_rank"]}
        flags |= {name: shlex.quote(str(value)) for name, value in own.items() if name in known}
        switches = ["--gradient_checkpointing"] if chosen["checkpointing"] != "none" else []
        switches += ["--use_8bit_adam"] if chosen["optimizer"] == "adamw-8bit-bnb" else []
        switches += ["--cache_latents"] if chosen["encoders"] == "off" and "cache_latents" in known else []
        unsaid = [f"{_NAMES.get(name, name)}={value}" for name, value in own.items() if name not in known]
        unsaid += [f"optimizer={chosen['optimizer']}"] if chosen["optimizer"] not in _ADAMW else []
        remark = [f"# and no flag for {', '.join(unsaid)}: write it into train.py"] if unsaid else []
        return " ".join(["train.py", *(f"--{name} {value}" for name, value in flags.items()), *switches, *remark])

    def write_files(self, chosen: Mapping[str, Any], config: Any, folder: Path) -> dict[str, str]:
        """Write the files that flags name, and return these flags' values."""
        loading, path = _LOADED.get(chosen["quantize"]), folder / "quantization.json"
        if loading is None or _BNB_FILE not in family_of(config).flags:
            return {}
        path.write_text(json.dumps(loading, indent=2) + "\n", encoding="utf-8")
        return {_BNB_FILE: str(path)}

    def class_name(self, config: Any) -> str | None:
        return config.class_name if isinstance(config, DenoiserConfig) else None

    def lora_targets(self, config: Any) -> str:
        return family_of(config).lora_targets(config)

    def build(self, config: Any, source: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        model: nn.Module = config.build(source, dtype, **family_of(config).settings)
        return model

    def quantises(self, model: nn.Module) -> Callable[[str], bool]:
        """Return whether diffusers quantises the linear layer of a name: all, but for those that stay in float32."""
        return lambda name: not kept_in_float32(model, name)

    def checkpoint(self, model: Any, use_reentrant: bool = False) -> None:
        if use_reentrant:
            raise ValueError("checkpointing='reentrant': diffusers' models have torch's newer kind alone; use 'full'")
        model.enable_gradient_checkpointing()

    def describe(self, config: Any, sample: Sample) -> str:
        family_of(config).check(config)
        height, width = image_size(config, sample)
        frames = num_frames(config, sample)
        kind = f"videos of {frames} frames" if frames else "images"
        tokens = num_text_tokens(config, sample)
        embedded = "" if sample.encoders == "device" else "embeddings of "
        text = f" and {embedded}{tokens} text tokens" if tokens else ""
        return f"{_ENCODERS[sample.encoders]} {height}x{width} {kind}{text}"

    def batch(self, config: Any, num_samples: int, sample: Sample) -> dict[str, Tensor]:
        """Return latents `(num_samples, channels, height, width)`, or with frames before height, and conditions."""
        from transformers.modeling_utils import local_torch_dtype

        family = family_of(config)
        sizes = sizes_of(config, num_samples, sample)
        grid = sizes[2:] if family.frames else sizes[3:]
        with local_torch_dtype(sample.dtype):
            latents = torch.zeros(num_samples, family.channels(config), *grid)
            return {"latents": latents} | family.conditions(config, sizes)

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        family = family_of_model(model)
        conditions = dict(inputs)
        latents = conditions.pop("latents")
        with quiet():  # torch says which norms of mixed types it does not fuse
            return family.loss(lambda noisy, times: family.predict(model, noisy, times, conditions), latents)


def _own_flags(chosen: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Any]]:
    """Yield flags that not all scripts have."""
    yield from _size_flags(chosen, config)
    if chosen["text_tokens"] is not None:
        yield "max_sequence_length", chosen["text_tokens"]
    if chosen["lora_rank"] is not None and chosen["lora_targets"] != family_of(config).lora_targets(config):
        yield "lora_layers", chosen["lora_targets"]
    if chosen.get(_BNB_FILE) is not None:
        yield _BNB_FILE, chosen[_BNB_FILE]
    elif chosen["quantize"] != "none":
        yield "quantize", chosen["quantize"]


def _size_flags(chosen: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Any]]:
    sample = Sample(1, image_size=parse_image_size(chosen["image_size"]), num_frames=chosen["num_frames"])
    height, width = image_size(config, sample)
    frames = num_frames(config, sample)
    if frames:
        yield from (("height", height), ("width", width), ("max_num_frames", frames))
    elif height == width:
        yield "resolution", height
    else:
        yield "image_size", f"{height}x{width}"
