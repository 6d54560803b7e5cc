"""The flags of diffusers' training scripts, and the file that one names, for a plan's choice."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.jobs.diffusers_models.denoiser_families import family_of
from hf_memopt.jobs.diffusers_models.denoiser_sizes import image_size, num_frames
from hf_memopt.jobs.transformers_models.model_batches import Sample, parse_image_size

# Flags of some scripts, and what `ModelOptions` calls their values.
_BNB_FILE = "bnb_quantization_config_path"
_NAMES = {"max_sequence_length": "text_tokens", "lora_layers": "lora_targets", _BNB_FILE: "quantize"}
# Fields of the BitsAndBytesConfig in the file.
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_LOADED: dict[str, dict[str, Any]] = {
    "nf4": _NF4,
    "nf4-double": {**_NF4, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
_ADAMW = ("adamw", "adamw-foreach", "adamw-8bit-bnb")


def script_flags(chosen: Mapping[str, Any], config: Any) -> str:
    """Return flags for what is chosen, and a remark on what the script has no flags for."""
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
    return " ".join([*(f"--{name} {value}" for name, value in flags.items()), *switches, *remark])


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


def write_files(chosen: Mapping[str, Any], config: Any, folder: Path) -> dict[str, str]:
    """Write the files that flags name, and return these flags' values."""
    loading, path = _LOADED.get(chosen["quantize"]), folder / "quantization.json"
    if loading is None or _BNB_FILE not in family_of(config).flags:
        return {}
    path.write_text(json.dumps(loading, indent=2) + "\n", encoding="utf-8")
    return {_BNB_FILE: str(path)}
