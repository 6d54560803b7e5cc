"""Files of TrainingArguments, and those that TRL's scripts read: YAML or JSON, without sections.

Some fields have been renamed: versions of transformers that have both names read the older one only where the newer has
no value, and then keep both equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from hf_memopt.command_line import argparse_raising
from hf_memopt.jobs.spec import nearest, read_fields

# TRL's ModelConfig; a plain Trainer is made with the same.
MODEL_FIELDS: dict[str, Any] = {
    "model_name_or_path": None,
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
}
_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Not simulated, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "deepspeed": (None,),
    "fsdp": (None, "", [], False),
    "parallelism_config": (None,),
    "use_liger_kernel": (None, False),
    "activation_offloading": (None, False),
    "model_init_kwargs": (None, {}),
    "optim_target_modules": (None,),
    "auto_find_batch_size": (False,),
}
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
)
# These hold no memory in training steps, and would ask for a device, a network, other data or a tokenizer.
_LEFT_OUT: dict[str, Any] = {
    "use_cpu": True,
    "bf16_full_eval": True,  # leaves a model without memory where it is
    "fp16_full_eval": False,
    "tf32": None,
    "report_to": [],
    "eval_strategy": "no",
    "eval_on_start": False,
    "do_eval": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "disable_tqdm": True,
    "log_level": "error",
    "full_determinism": False,
    "eos_token": None,
    "pad_token": None,
    "chat_template_path": None,
    "assistant_only_loss": False,
    "completion_only_loss": None,
    "dataset_num_proc": None,
    "dataset_kwargs": None,
}


@dataclass(frozen=True)
class ArgumentFile:
    """The contents of a file of arguments.

    Attributes:
        path: path of the file.
        given: its fields, by the names that the installed transformers prefers.
        is_sft: whether it is for TRL's SFTTrainer: it has fields that TrainingArguments lacks.
    """

    path: Path
    given: Mapping[str, Any]
    is_sft: bool

    def model_fields(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that describe the model and its adapters, defaults included."""
        given = dict(self.given) | dict(changes)
        return {name: given.get(name, default) for name, default in MODEL_FIELDS.items()}

    def training_arguments(self, changes: Mapping[str, Any], output_dir: str) -> Any:
        """Return the TrainingArguments or the SFTConfig of the file, for a trainer on the CPU that writes nothing.

        Args:
            changes: fields that have other values than in the file.
            output_dir: an empty folder.

        Raises:
            ValueError: a value is none of its field's, or is not simulated.
        """
        kind = _sft_config() if self.is_sft else TrainingArguments
        names = _names(kind)
        given = dict(self.given) | current_names(changes)
        _refuse(given)
        values = {name: value for name, value in (given | _LEFT_OUT).items() if name in names}
        parser = HfArgumentParser(kind)
        parser.set_defaults(**(values | {"output_dir": output_dir}))
        with argparse_raising():
            (arguments,) = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
        if arguments.optim not in OPTIMIZERS:
            raise ValueError(f"optim={arguments.optim.value!r} is not simulated; choose from {', '.join(OPTIMIZERS)}")
        return arguments


def read_argument_file(path: Path) -> ArgumentFile:
    """Read a file of arguments.

    Args:
        path: YAML or JSON, with fields of TrainingArguments; fields of TRL's SFTConfig, ModelConfig and ScriptArguments
            make it one for SFTTrainer.

    Raises:
        ValueError: it cannot be read; a field belongs to none of these, or to TRL, which is not installed.
    """
    source = f"training_args={str(path)!r}"
    given = read_fields(source, path, "TrainingArguments", "bf16: true")
    known = _names(TrainingArguments)
    others = [name for name in given if name not in known]
    if others:
        known |= _names_of_trl(others[0])
    for name in others:
        if name not in known:
            raise ValueError(
                f"{source}: {name!r} is a field of neither TrainingArguments nor TRL's SFTConfig, ModelConfig and "
                f"ScriptArguments; the nearest is {nearest(name, known)}. For another trainer call "
                "estimate_trainer(trainer)"
            )
    return ArgumentFile(path, current_names(given), is_sft=bool(others))


def current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Use the names that the installed transformers prefers; a newer name's value wins."""
    current = {name: _current_name(name) for name in given}
    return {new: given[name] for name, new in current.items() if new == name or new not in given}


def set_fields(arguments: TrainingArguments, values: Mapping[str, Any]) -> None:
    """Set fields under both names where the installed transformers has two."""
    for name, value in values.items():
        for each in {name, _current_name(name)}:
            setattr(arguments, each, value)


def _refuse(given: Mapping[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        if name in given and given[name] not in harmless:
            raise ValueError(
                f"{name}={given[name]!r} is not simulated; leave it out of the file to estimate without it"
            )


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _sft_config() -> Any:
    from trl import SFTConfig

    return SFTConfig


def _names_of_trl(first: str) -> set[str]:
    """Return the fields of TRL's script; `env` are variables."""
    try:
        from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig
    except ModuleNotFoundError as error:
        raise ValueError(f"{first!r} is not a field of TrainingArguments; for those of TRL: pip install trl") from error
    kinds: Iterable[Any] = (SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
    return {"env"}.union(*map(_names, kinds))


def _current_name(name: str) -> str:
    newer = _NEWER.get(name, name)
    return newer if newer in {field.name for field in fields(TrainingArguments)} else name
