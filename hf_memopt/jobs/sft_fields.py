"""The fields of the recipe `train_sft`, by which a planned training of a causal model is run."""

from collections.abc import Mapping
from typing import Any

from hf_memopt.jobs.workload import RESIDENT

# The names of Trainer's optimizers, and those of plans; the first name of each is written.
OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw-foreach",
    "adamw_torch_8bit": "adamw-8bit",
    "adamw_torch_4bit": "adamw-4bit",
    "adamw_bnb_8bit": "adamw-8bit-bnb",
    "adamw_8bit": "adamw-8bit-bnb",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "paged_adamw_32bit": "paged-adamw-32bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
# Trainer's `accelerator_config` for gradients that are reduced in each pass.
SYNCED_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
# The recipe's names of frozen weights in few bits, and those of plans.
STORED = {"none": "none", "nf4": "nf4", "nf4-double": "nf4-double", "int8": "int8-torchao", "llm-int8": "int8"}


def can_train(options: Any) -> bool:
    """Return whether the recipe has flags for all of a model's options (`ModelOptions`)."""
    is_stored = options.quantize in STORED.values() and options.kbit_preparation == "trl"
    return options.kind == "causal" and is_stored and not options.optimizer_in_backward


def trainer_fields(chosen: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "per_device_train_batch_size": chosen["micro_batch"],
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "gradient_checkpointing": chosen["checkpointing"] in ("full", "reentrant"),
        "max_grad_norm": chosen["max_grad_norm"] or 0.0,
        "optim": _name(OPTIMIZERS, chosen["optimizer"]),
        "bf16": chosen["precision"] == "bf16",
        "fp16": chosen["precision"] == "fp16",
    }
    if chosen["checkpointing"] == "reentrant":
        fields["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    if chosen["sync_each_batch"]:
        fields["accelerator_config"] = SYNCED_EACH_BATCH
    return fields


def fields_of(options: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a YAML file for `train_sft --config`."""
    fields = {
        **{name: chosen[name] for name in ("model", "dtype", "attention", "loss", "offload", "offload_threshold_mb")},
        "max_length": chosen["seq_len"],
        **trainer_fields(chosen),
        "gradient_checkpointing_kwargs": {"use_reentrant": chosen["checkpointing"] == "reentrant"},
        "selective_checkpointing": chosen["checkpointing"] == "selective",
    }
    if options.optimizer_home != "off":
        fields["optimizer_home"] = options.optimizer_home
    if chosen["base"] != RESIDENT:
        about = {"base": chosen["base"], "base_budget_gib": options.base_budget_gib, "trained": options.trained}
        fields |= {name: value for name, value in about.items() if value not in (None, False)}
    if chosen["lora_rank"] is not None:
        fields |= {name: chosen[name] for name in ("lora_rank", "lora_targets", "use_dora")}
        fields["quantize"] = _name(STORED, chosen["quantize"])
    return fields


def _name(names: dict[str, str], planned: str) -> str:
    return next(name for name, known in names.items() if known == planned)
