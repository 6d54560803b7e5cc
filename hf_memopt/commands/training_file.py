"""`--training-args FILE`: training as a file of TrainingArguments or of TRL's SFTConfig says, and flags overrule it."""

import argparse
from typing import TYPE_CHECKING, Any

from hf_memopt.commands.model_flags import words_of

if TYPE_CHECKING:
    from hf_memopt.integrations.transformers.file_workload import FileWorkload

# Which field a flag overrules.
_FIELDS = {
    "model": "model_name_or_path",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "dtype": "dtype",
    "attention": "attn_implementation",
    "lora_rank": "lora_r",
    "lora_targets": "lora_target_modules",
    "use_dora": "use_dora",
}
# Flags whose values are spelled otherwise in the file.
_VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "precision": {name: {"bf16": name == "bf16", "fp16": name == "fp16"} for name in ("no", "bf16", "fp16")},
    "checkpointing": {name: {"gradient_checkpointing": name == "full"} for name in ("none", "full")},
    "quantize": {
        name: {"load_in_4bit": name == "nf4", "load_in_8bit": name == "int8"} for name in ("none", "nf4", "int8")
    },
    "optimizer": {
        "adamw": {"optim": "adamw_torch_fused"},
        "adamw-foreach": {"optim": "adamw_torch"},
        "adamw-8bit": {"optim": "adamw_torch_8bit"},
        "adamw-4bit": {"optim": "adamw_torch_4bit"},
        "adafactor": {"optim": "adafactor"},
        "sgd": {"optim": "sgd"},
    },
}
# Flags that say nothing about the training, or that the workload takes itself.
_OTHERS = {"training_args", "seq_len", "task", "offload", "effective_batch", "gpu", "check", "json", "timeline"}
_OTHERS |= {"snapshot", "host", "link", "output", "explain", "workers", "max_grad_norm"}


def workload_of(parsed: argparse.Namespace) -> "FileWorkload":
    """Return the workload that `--training-args` and the flags beside it describe.

    Raises:
        ValueError: a flag has no place beside the file; see also `FileWorkload`.
    """
    changes = _changes(parsed)
    from hf_memopt.integrations.transformers.argument_file import read_argument_file
    from hf_memopt.integrations.transformers.file_workload import FileWorkload

    return FileWorkload(
        read_argument_file(parsed.training_args),
        changes,
        seq_len=parsed.seq_len if "seq_len" in parsed.given else None,
        task=parsed.task or "auto",
        effective_batch=getattr(parsed, "effective_batch", None),
    )


def flags(parsed: argparse.Namespace) -> list[str]:
    """Return the flags that say the same to `plan`, which chooses batches and checkpointing itself."""
    words = ["--training-args", str(parsed.training_args)]
    batches = {"batch_size", "accumulation"} & parsed.given
    if batches:
        words += ["--effective-batch", str(parsed.batch_size * (parsed.accumulation or 1))]
    for name in sorted(_named(parsed) & (_FIELDS.keys() | _VALUES.keys() | {"seq_len", "task"})):
        if name not in ("batch_size", "accumulation", "checkpointing"):
            words += words_of(parsed, name)
    return words


def _changes(parsed: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in sorted(_named(parsed) - _OTHERS):
        value, flag = getattr(parsed, name), name.replace("_", "-")
        if name in _FIELDS:
            changes[_FIELDS[name]] = value
        elif value in _VALUES.get(name, {}):
            changes |= _VALUES[name][value]
        else:
            raise ValueError(f"--{flag}={value!s} has no field in --training-args; leave one of the two out")
    if changes.get("attn_implementation") == "auto":
        changes["attn_implementation"] = None
    if "lora_r" in changes:
        changes["use_peft"] = True
    targets = changes.get("lora_target_modules", "all-linear")
    if targets != "all-linear":
        changes["lora_target_modules"] = targets.split(",")
    return changes


def _named(parsed: argparse.Namespace) -> set[str]:
    """Return the flags of the command line that have a value; a MODEL that is left out counts as given."""
    return {name for name in parsed.given - {"command", "run"} if getattr(parsed, name) is not None}
