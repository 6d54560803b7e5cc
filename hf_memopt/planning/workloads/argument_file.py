"""Files of TrainingArguments, and those that TRL's scripts read: YAML or JSON, without sections.

Some fields have been renamed: versions of transformers that have both names read the older one only where the newer has
no value, and then keep both equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser, TrainingArguments

from hf_memopt.command_line import argparse_raising
from hf_memopt.planning.job import OPTIMIZERS, PLAIN_TRAINER, nearest, read_fields
from hf_memopt.planning.models.quiet import quiet, refused_by
from hf_memopt.planning.workloads.other_files import Tool, tool_of
from hf_memopt.planning.workloads.trl_trainers import TRL, TrlTrainer, need_trl, trainer_for

# TRL's ModelConfig; a plain Trainer is made with the same.
MODEL_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("model_name_or_path", "attn_implementation", "bnb_4bit_quant_storage")),
    **dict.fromkeys(("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")),
    **dict.fromkeys(("use_peft", "use_rslora", "use_dora"), False),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "use_bnb_nested_quant"), False),
    "model_revision": "main",
    "dtype": "float32",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_task_type": "CAUSAL_LM",
    "bnb_4bit_quant_type": "nf4",
}
_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Not simulated, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("deepspeed", "parallelism_config", "optim_target_modules", "reward_model_name_or_path"), (None,)),
    **dict.fromkeys(("use_liger_kernel", "activation_offloading", "precompute_ref_log_probs"), (None, False)),
    **dict.fromkeys(("use_transformers_continuous_batching", "use_transformers_paged"), (None, False)),
    "fsdp": (None, "", [], False),
    "model_init_kwargs": (None, {}),
    "auto_find_batch_size": (False,),
    "cache_implementation": (None, "dynamic"),
}
# These hold no memory in training steps, and would ask for a device, a network, other data or a tokenizer.
_LEFT_OUT: dict[str, Any] = {
    "use_cpu": True,
    "bf16_full_eval": True,  # leaves a model without memory where it is
    "fp16_full_eval": False,
    "tf32": None,
    "report_to": [],
    "disable_tqdm": True,
    "log_level": "error",
    **dict.fromkeys(("eval_strategy", "save_strategy"), "no"),
    **dict.fromkeys(("do_eval", "eval_on_start", "generate_during_eval", "log_completions"), False),
    **dict.fromkeys(("load_best_model_at_end", "push_to_hub", "full_determinism", "assistant_only_loss"), False),
    **dict.fromkeys(("resume_from_checkpoint", "eos_token", "pad_token", "chat_template_path")),
    **dict.fromkeys(("completion_only_loss", "dataset_num_proc", "dataset_kwargs")),
}


@dataclass(frozen=True)
class ArgumentFile:
    """The contents of a file of arguments.

    Attributes:
        path: path of the file; None, the fields have no file, but the trainer's defaults.
        given: its fields, by the names that the installed transformers prefers.
        trainer: the trainer of TRL that it is for; None, transformers' Trainer.
        tool: the program that it is for; None, a script with these settings.
        original: its fields by their own names, where it is for another program.
        unread: those of `original` that `given` lacks.
    """

    path: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    trainer: TrlTrainer | None = None
    tool: Tool | None = None
    original: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def trainer_name(self) -> str:
        return "Trainer" if self.trainer is None else self.trainer.class_name

    @property
    def name(self) -> str:
        """The name of the file, also of one that is still to be written."""
        if self.path is not None:
            return self.path.name
        return "arguments.yaml" if self.trainer is None else f"{self.trainer.name}.yaml"

    def model_fields(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that describe the model and its adapters, defaults included."""
        given = dict(self.given) | dict(changes)
        return {name: given.get(name, default) for name, default in MODEL_FIELDS.items()}

    def training_arguments(self, changes: Mapping[str, Any], output_dir: str) -> Any:
        """Return the settings of the file's trainer, on the CPU, where it writes nothing.

        Args:
            changes: fields that have other values than in the file.
            output_dir: an empty folder.

        Raises:
            ValueError: a value is none of its field's, or is not simulated.
        """
        kind = TrainingArguments if self.trainer is None else self.trainer.config
        names = _names(kind)
        given = dict(self.given) | current_names(changes)
        _refuse(given)
        values = {name: value for name, value in (given | _LEFT_OUT).items() if name in names}
        parser = HfArgumentParser(kind)
        parser.set_defaults(**(values | {"output_dir": output_dir}))
        with argparse_raising(), quiet(), refused_by(kind.__name__):
            (arguments,) = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
        if arguments.optim not in OPTIMIZERS:
            raise ValueError(f"optim={arguments.optim.value!r} is not simulated; choose from {', '.join(OPTIMIZERS)}")
        return arguments


def read_argument_file(path: Path, trainer: str | None = None) -> ArgumentFile:
    """Read a file of arguments.

    Args:
        path: YAML or JSON, with fields of TrainingArguments, or of the settings of a trainer of TRL, its ModelConfig
            and its script's arguments; or of LLaMA-Factory or axolotl.
        trainer: one of `TRAINERS`; None, the one that has all fields: transformers' Trainer, SFTTrainer, or the only
            one of the others.

    Raises:
        ValueError: it cannot be read; a field belongs to none of these, or to TRL, which is not installed; or several
            trainers have all fields.
    """
    source = f"training_args={str(path)!r}"
    given = read_fields(source, path, "TrainingArguments", "bf16: true")
    if (tool := tool_of(given)) is not None and trainer is None:
        fields_given, unread = tool.translated(given, _names(TrainingArguments) | {"max_length", *MODEL_FIELDS}, source)
        _check_types(fields_given, None, source)
        return ArgumentFile(path, current_names(fields_given), None, tool, given, tuple(unread))
    others = [name for name in given if name not in _names(TrainingArguments)]
    if trainer == PLAIN_TRAINER or (trainer is None and not others):
        for name in others:
            near = nearest(name, _names(TrainingArguments))
            raise ValueError(f"{source}: {name!r} is no field of TrainingArguments; the nearest is {near}")
        _check_types(given, None, source)
        return ArgumentFile(path, current_names(given))
    need_trl(f"{others[0]!r} is not a field of TrainingArguments" if others else f"trainer={trainer!r}")
    found = trainer_for(given, source) if trainer is None else TRL[trainer]
    known = set().union(*(each.names() for each in (TRL.values() if found is None else [found])))
    for name in others:
        if name not in known:
            owner = "any trainer of TRL" if found is None else f"TRL's {found.class_name}"
            raise ValueError(
                f"{source}: {name!r} is no field of TrainingArguments or of {owner}; the nearest is "
                f"{nearest(name, known)}"
            )
    _check_types(given, found, source)
    return ArgumentFile(path, current_names(given), found)


def _check_types(given: Mapping[str, Any], trainer: TrlTrainer | None, source: str) -> None:
    """Refuse values that are of none of a field's types. Texts are left to the parser, which reads numbers of them."""
    hints: dict[str, Any] = {}
    for kind in [TrainingArguments] if trainer is None else trainer.dataclasses():
        hints |= get_type_hints(kind)
    for name, value in given.items():
        if name in hints and not isinstance(value, str | None) and not _is_of(value, hints[name]):
            wanted = getattr(hints[name], "__name__", None) or str(hints[name]).replace("typing.", "")
            raise ValueError(f"{source}: {name}={value!r} must be {wanted}")


def _is_of(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple):
        return isinstance(value, list) and all(_is_of(each, arguments[0]) for each in value if arguments)
    if hint in (bool, int, float):
        kinds = {bool: bool, int: int, float: int | float}
        return isinstance(value, kinds[hint]) and isinstance(value, bool) == (hint is bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


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
    # As a server, on another GPU, vLLM takes no memory here.
    if given.get("use_vllm") and given.get("vllm_mode", "colocate") != "server":
        raise ValueError(
            "use_vllm=True with vllm_mode='colocate' is not simulated: vLLM takes a share of the same GPU for itself; "
            "use vllm_mode: server on another GPU, or leave use_vllm out"
        )


def _names(kind: Any) -> set[str]:
    return {each.name for each in fields(kind)}


def _current_name(name: str) -> str:
    newer = _NEWER.get(name, name)
    return newer if newer in _names(TrainingArguments) else name
