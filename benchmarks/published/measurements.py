"""Reads published measurements."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """A measured training step and its figures."""

    id: str  # place of the figures in the source
    source: str
    model: str  # key of `models.json`
    gpu: str  # name in `CARDS`, or of another card, such as "mi250"
    task: str  # "causal", "masked", "sequence-classification", "question-answering" or "image-classification"
    dtype: str  # of the weights: "float32", "float16" or "bfloat16"
    batch_size: int  # samples per forward pass
    optimizer: str  # "adamw" is torch's default AdamW, "none" means no update
    attention: str = "sdpa"  # transformers' implementation: "eager" or "sdpa"
    seq_len: int | None = None  # padding included; None for images
    base: str = ""  # storage of frozen weights, such as "nf4"; "" for `dtype`
    is_prepared: bool = True  # whether other weights than those in 4 bits are float32, as PEFT prepares them
    lora_rank: int | None = None  # None if all weights are trained
    lora_targets: list[str] = field(default_factory=list)
    lora_alpha_per_rank: float = 1
    adapters_dtype: str = "float32"
    checkpointing: bool = False  # whether blocks are recomputed
    accumulation: int = 1  # forward passes per update
    precision: str = "no"  # of autocast: "no", "bf16" or "fp16"
    tf32: bool = False  # whether products of float32 may use TF32
    loss: str = "labels"  # or "logits" for their sum
    max_grad_norm: float | None = 1.0  # None without clipping
    expands_grouped_heads: bool = False  # whether keys and values are repeated before the attention kernel
    zeroes_first: bool = False  # whether a step begins with `zero_grad`, so that gradients outlive steps
    allocated_mib: float | None = None  # by `torch.cuda.max_memory_allocated`
    reserved_mib: float | None = None  # by `torch.cuda.max_memory_reserved`
    other_mib: float | None = None  # another figure, named by the source's kind
    step_s: float | None = None
    unknown: str = ""  # gaps in the source's configuration, or its deviations from ours
    time_unknown: str = ""  # gaps in the description of the device, for which `step_s` is not compared
    not_simulated: str = ""  # reason for a missing estimate
    role: str = ""  # purpose of the row in the source
    stack: str = ""  # versions

    @property
    def name(self) -> str:
        return f"{self.source} {self.id}"

    @property
    def has_memory(self) -> bool:
        return (self.allocated_mib or self.reserved_mib or self.other_mib) is not None


def sources() -> dict[str, dict[str, Any]]:
    """Return the files by name: each with `source`, `licence`, `kind` of figure, `shared` settings and `rows`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((_FOLDER / "measured").glob("*.json"))}


def measurements() -> list[Measurement]:
    return [
        Measurement(source=name, **file["shared"] | row) for name, file in sources().items() for row in file["rows"]
    ]


def model_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((_FOLDER / "models.json").read_text())[name]
    return config
