"""Plans for `train_sft.py`: its model in a step of its size, run on fake tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from accelerate import PartialState

from hf_memopt.integrations.transformers.argument_file import current_names, set_fields
from hf_memopt.jobs import Row
from hf_memopt.jobs.accelerate_config import write_accelerate_config
from hf_memopt.jobs.huggingface import HuggingFaceModel
from hf_memopt.jobs.model_levers import ACTIVATIONS
from hf_memopt.jobs.sft_fields import OPTIMIZERS, STORED
from hf_memopt.recipes.common.auto_plan import best_row
from hf_memopt.recipes.sft.conversations import write_tiny_model
from hf_memopt.recipes.sft.options import Options, parse
from hf_memopt.shipped_configs import config_file
from hf_memopt.text_files import read_values

__all__ = ["workload"]

# The planner's names of the homes of a frozen base. The other home is for a host without room.
HOMES = {"off": "resident", "auto": "host", "host": "host", "file": "file"}

_TINY_MODELS: list[TemporaryDirectory[str]] = []


def workload(
    config_path: str | Path, *, precision: str | None = None, effective_batch: int | None = None
) -> "SupervisedFineTuning":
    """Return the workload of a configuration file, as for `train_sft.py --config FILE`.

    `precision` is "no", "bf16" or "fp16"; `effective_batch` counts conversations per update; None, as in the file.
    """
    file = config_file("config", Path(config_path))
    options = parse("", ["--config", str(file)])
    given = read_values(file)
    changes = {"given": given, "precision": precision, "effective_batch": effective_batch}
    changes = {name: value for name, value in changes.items() if value is not None}
    if options.sft.model is None:
        _TINY_MODELS.append(TemporaryDirectory())  # its configuration is read while the plan is made
        options.sft.model = write_tiny_model(Path(_TINY_MODELS[-1].name), options.training.seed)
    return simulated(options, **changes)


def simulated(options: Options, **changes: Any) -> "SupervisedFineTuning":
    """Return the workload of flags that name a model, with `max_length` tokens in each conversation."""
    sft, training, memopt = options
    if training.optim.value not in OPTIMIZERS:
        raise ValueError(f"optim={training.optim.value!r} is not simulated; choose from {', '.join(OPTIMIZERS)}")
    same = ("model", "loss", "attention", "dtype", "use_dora", "lora_rank")
    of_flags = {
        **{name: getattr(sft, name) for name in same},
        "seq_len": training.max_length,
        "effective_batch": training.per_device_train_batch_size * training.gradient_accumulation_steps,
        "task": "causal",
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "no",
        "optimizer": OPTIMIZERS[training.optim.value],
        "optimizer_home": memopt.optimizer_home,
        "lora_targets": sft.lora_targets if sft.lora_rank else None,
        "quantize": STORED[sft.quantize],
        "base": HOMES[memopt.base],
        "base_budget": None if memopt.base_budget_gib is None else f"{memopt.base_budget_gib}GiB",
        "trained": memopt.trained,
        "max_grad_norm": training.max_grad_norm or None,
        "offload_threshold_mb": memopt.offload_threshold_mb,
    }
    return SupervisedFineTuning(**(of_flags | changes))


def apply_plan(options: Options) -> Row | None:
    """Change the flags to the choice of a plan for `--plan`'s card; return its prediction. Without it, do nothing."""
    if options.sft.plan is None:
        return None
    model = simulated(options)
    best = best_row(model, options.sft.plan, PartialState())
    chosen = model.flags(best.settings, best.micro_batch)
    options.memopt.offload = chosen.pop("offload")
    options.memopt.selective_checkpointing = chosen.pop("selective_checkpointing")
    set_fields(options.training, chosen)
    return best


@dataclass(frozen=True)
class SupervisedFineTuning(HuggingFaceModel):
    """A transformers model with the choices that the recipe has flags for; `given` is its configuration file."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def flags(self, settings: Mapping[str, Any], micro_batch: int) -> dict[str, Any]:
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        return {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": self.effective_batch // micro_batch,
            "gradient_checkpointing": checkpointing == "full",
            "selective_checkpointing": checkpointing == "selective",
            "offload": offload,
        }

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        chosen = self.flags(settings, micro_batch)
        precisions = {name: self.precision == name for name in ("bf16", "fp16")}
        # The plan takes their place.
        kept = {name: value for name, value in self.given.items() if name not in ("plan", "budget_gib")}
        (folder / "sft.yaml").write_text(
            yaml.safe_dump(current_names(kept) | precisions | current_names(chosen), sort_keys=False),
            encoding="utf-8",
        )
        return [write_accelerate_config(folder / "accelerate.yaml", self.precision), folder / "sft.yaml"]

    def command(self, written: list[Path]) -> str:
        config, fields = written
        return f"accelerate launch --config_file {config} -m hf_memopt.recipes.train_sft --config {fields}"
