"""Reads published measurements."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """A measured training step and its figures.

    Attributes:
        id: place of the figures in the source.
        source: name of the source.
        model: key of `models.json`.
        gpu: name in `CARDS`, or of another card, such as "mi250".
        task: "causal", "masked", "sequence-classification", "question-answering" or "image-classification".
        dtype: dtype of the weights: "float32", "float16" or "bfloat16".
        base: storage of frozen weights, such as "nf4"; "" for `dtype`.
        attention: transformers' implementation of attention: "eager" or "sdpa".
        batch_size: samples per forward pass.
        seq_len: tokens per sample, padding included; None for images.
        lora_rank: rank of the adapters; None if all weights are trained.
        lora_targets: names of the layers with adapters.
        lora_alpha_per_rank: scale of the adapters.
        adapters_dtype: dtype of the adapters' weights.
        checkpointing: whether blocks are recomputed.
        accumulation: forward passes per update.
        precision: precision of autocast: "no", "bf16" or "fp16".
        tf32: whether products of float32 may use TF32.
        loss: "labels", or "logits" for the sum of the logits.
        optimizer: name of the optimizer: "adamw" is torch's default AdamW, "none" means no update.
        max_grad_norm: largest norm of the gradients, which are clipped to it; None without clipping.
        expands_grouped_heads: whether keys and values are repeated before the attention kernel.
        zeroes_first: whether a step begins with `zero_grad`, so that gradients outlive steps.
        allocated_mib: MiB by `torch.cuda.max_memory_allocated`.
        reserved_mib: MiB by `torch.cuda.max_memory_reserved`.
        other_mib: MiB of another figure, named by the source's kind.
        step_s: seconds of a step.
        unknown: gaps in the source's configuration, or its deviations from ours; "" without any.
        time_unknown: gaps in the description of the device, for which `step_s` is not compared; "" without any.
        not_simulated: reason for a missing estimate; "" if there is an estimate.
        role: purpose of the row in the source.
        stack: versions.
    """

    id: str
    source: str
    model: str
    gpu: str
    task: str
    dtype: str
    batch_size: int
    optimizer: str
    attention: str = "sdpa"
    seq_len: int | None = None
    base: str = ""
    lora_rank: int | None = None
    lora_targets: list[str] = field(default_factory=list)
    lora_alpha_per_rank: float = 1
    adapters_dtype: str = "float32"
    checkpointing: bool = False
    accumulation: int = 1
    precision: str = "no"
    tf32: bool = False
    loss: str = "labels"
    max_grad_norm: float | None = 1.0
    expands_grouped_heads: bool = False
    zeroes_first: bool = False
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    other_mib: float | None = None
    step_s: float | None = None
    unknown: str = ""
    time_unknown: str = ""
    not_simulated: str = ""
    role: str = ""
    stack: str = ""

    @property
    def name(self) -> str:
        """Return the names of source and row."""
        return f"{self.source} {self.id}"

    @property
    def has_memory(self) -> bool:
        """Return whether the source gives a figure of memory."""
        return (self.allocated_mib or self.reserved_mib or self.other_mib) is not None


def sources() -> dict[str, dict[str, Any]]:
    """Return the files by name: each with `source`, `licence`, `kind` of figure, `shared` settings and `rows`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((_FOLDER / "measured").glob("*.json"))}


def measurements() -> list[Measurement]:
    """Return all rows, source by source."""
    return [
        Measurement(source=name, **file["shared"] | row) for name, file in sources().items() for row in file["rows"]
    ]


def model_config(name: str) -> dict[str, Any]:
    """Return the hyperparameters of a model, by transformers' names."""
    config: dict[str, Any] = json.loads((_FOLDER / "models.json").read_text())[name]
    return config
