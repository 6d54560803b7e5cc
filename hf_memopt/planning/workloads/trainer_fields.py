"""The flags of a job as fields of the trainer's settings and of TRL's ModelConfig, and back."""

from collections.abc import Mapping
from typing import Any

from hf_memopt.planning.job import FIELDS, NOT_CLIPPED, OPTIMIZERS, Job
from hf_memopt.planning.models.adapters import ALL_LINEAR
from hf_memopt.planning.workload import OFF

# The values of flags that are several fields, or have other values.
_VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "precision": {name: {"bf16": name == "bf16", "fp16": name == "fp16"} for name in ("no", "bf16", "fp16")},
    "checkpointing": {
        "none": {"gradient_checkpointing": False},
        "selective": {"gradient_checkpointing": False},
        "full": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    },
    "optimizer": {planned: {"optim": name} for name, planned in reversed(OPTIMIZERS.items())},
}
# Flags that are fields with the same values.
_NAMED = {name: each.about.trainer_field for name, each in FIELDS.items()}
_FIELDS = {name: field for name, field in _NAMED.items() if field is not None and name not in _VALUES}
# Flags that have another name, or other values, than the fields.
SHORT = (*(name for name, field in _FIELDS.items() if name != field), *_VALUES, "quantize")
# Fields of `ModelOptions` that come from the settings, or from settings and job.
TAKEN = {*_FIELDS, *_VALUES, "quantize", "trainer", "loss", "task", "seq_len", "effective_batch"}
# Trainer's `accelerator_config` for gradients that are reduced in each pass.
SYNCED_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def of_job(job: Job) -> dict[str, Any]:
    """Return the fields that a job's flags say."""
    fields: dict[str, Any] = {}
    for name, value in job.said().items():
        if name in _FIELDS:
            fields[_FIELDS[name]] = value
        elif name in _VALUES:
            fields |= _VALUES[name].get(value, {})
    if fields.get("attn_implementation") == "auto":
        fields["attn_implementation"] = None
    if fields.get("max_grad_norm") == NOT_CLIPPED:
        fields["max_grad_norm"] = 0.0
    if "lora_r" in fields:
        fields["use_peft"] = True
        if job.training_args is None:
            fields.setdefault("lora_target_modules", ALL_LINEAR)
    targets = fields.get("lora_target_modules", ALL_LINEAR)
    if targets != ALL_LINEAR:
        fields["lora_target_modules"] = targets.split(",")
    if "lora_modules_to_save" in fields:
        fields["lora_modules_to_save"] = fields["lora_modules_to_save"].split(",")
    if job.quantize is not None and job.quantize != "auto":
        fields |= {
            "load_in_4bit": job.quantize.startswith("nf4"),
            "load_in_8bit": job.quantize == "int8-llm",
            "use_bnb_nested_quant": job.quantize == "nf4-double",
        }
    return fields


def to_options(settings: Any, is_selective: bool) -> dict[str, Any]:
    """Return the fields of `ModelOptions` that a trainer's settings have."""
    checkpointing = "selective" if is_selective else "none"
    if settings.gradient_checkpointing:
        is_reentrant = (settings.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
        checkpointing = "reentrant" if is_reentrant else "full"
    return {
        "checkpointing": checkpointing,
        "precision": "bf16" if settings.bf16 else "fp16" if settings.fp16 else "no",
        "optimizer": OPTIMIZERS[getattr(settings.optim, "value", settings.optim)],
        "max_grad_norm": settings.max_grad_norm or None,
    }


def of_recipe(options: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a YAML file for `train_sft --config`: the trainer's, the model's, and MemoptArguments."""
    memopt = {
        "quantize": options.quantize if options.quantize == "int8-torchao" else None,
        "adapters_dtype": options.adapters_dtype if options.adapters_dtype != "auto" else None,
        "freeze_layers": options.freeze_layers,
        "offload": options.offload,
        "offload_threshold_mb": options.offload_threshold_mb,
        "selective_checkpointing": options.checkpointing == "selective" or None,
        "base": options.home if options.home != OFF else None,
        "base_budget_gib": options.base_budget_gib,
        "trained": options.trained or None,
        "optimizer_home": options.optimizer_home if options.optimizer_home != "off" else None,
    }
    fields = {**fields, "bf16": options.precision == "bf16", "fp16": options.precision == "fp16"}
    return {**fields, **{name: value for name, value in memopt.items() if value is not None}, "dtype": options.dtype}
