"""The fields of the recipe `train_sft`, by which a planned training of a causal model is run."""

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


def fields_of(options: Any, checkpointing: str, offload: str, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """Return the fields of a YAML file for `train_sft --config`."""
    adapters = {} if options.lora_rank is None else _adapters(options)
    return {
        "model": options.model,
        "dtype": options.dtype,
        "attention": options.attention,
        "loss": options.loss,
        "max_length": options.seq_len,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": options.max_grad_norm or 0.0,
        "optim": _name(OPTIMIZERS, options.optimizer),
        "optimizer_on": "host" if options.sharing.offloads_by_torchao else "device",
        "bf16": options.precision == "bf16",
        "fp16": options.precision == "fp16",
        "gradient_checkpointing": checkpointing in ("full", "reentrant"),
        "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
        "selective_checkpointing": checkpointing == "selective",
        "offload": offload,
        "offload_threshold_mb": options.offload_threshold_mb,
        **adapters,
        **({"accelerator_config": SYNCED_EACH_BATCH} if options.sharing.syncs_each_batch else {}),
    }


def _adapters(options: Any) -> dict[str, Any]:
    budget = options.base_budget_gib
    streamed = {"base": options.home} | ({} if budget is None else {"base_budget_gib": budget})
    return {
        "lora_rank": options.lora_rank,
        "lora_targets": options.lora_targets or options.kind_of_task.lora_targets(options.config),
        "use_dora": options.use_dora,
        "quantize": _name(STORED, options.quantize),
        **(streamed if options.home != RESIDENT else {}),
    }


def _name(names: dict[str, str], planned: str) -> str:
    return next(name for name, known in names.items() if known == planned)
