"""Reads what others have measured."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """A training step that was measured, and its figures.

    Attributes:
        id: where in the source the figures are.
        source: who published them.
        model: in `models.json`.
        gpu: a name in `CARDS`, or one that is not there, such as "mi250".
        task: "causal", "masked", "sequence-classification", "question-answering" or "image-classification".
        dtype: of the weights: "float32", "float16" or "bfloat16".
        base: how frozen weights are stored, such as "nf4"; "", as `dtype` says.
        attention: of transformers: "eager" or "sdpa".
        batch_size: samples per forward pass.
        seq_len: tokens per sample, padding included; None for images.
        lora_rank: of the adapters; None, all weights are trained.
        lora_targets: names of the layers that have adapters.
        lora_alpha_per_rank: their scale.
        adapters_dtype: of their weights.
        checkpointing: whether blocks are computed again.
        accumulation: forward passes per update.
        precision: of autocast: "no", "bf16" or "fp16".
        tf32: whether products of float32 were allowed to be made in TF32.
        loss: "labels", or "logits" for their sum.
        optimizer: "adamw" is torch's default one; "none", there was no update.
        max_grad_norm: gradients are clipped to this norm; None, they are not.
        expands_grouped_heads: whether keys and values are repeated before the kernel of attention.
        zeroes_first: whether a step begins with `zero_grad`, so that gradients live on between steps.
        allocated_mib: what `torch.cuda.max_memory_allocated` said.
        reserved_mib: what `torch.cuda.max_memory_reserved` said.
        other_mib: another figure; the source's kind says which.
        step_s: seconds of a step.
        unknown: what of the configuration the source does not tell, or what it does otherwise; "", nothing.
        time_unknown: what the source does not tell of the device, so that `step_s` is not compared; "", nothing.
        not_simulated: why there is no estimate; "", there is one.
        role: what the source used the row for.
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
        """Of source and row."""
        return f"{self.source} {self.id}"

    @property
    def has_memory(self) -> bool:
        """Whether the source gives a figure of memory."""
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
    """Return the hyperparameters of a model, as transformers calls them."""
    config: dict[str, Any] = json.loads((_FOLDER / "models.json").read_text())[name]
    return config
