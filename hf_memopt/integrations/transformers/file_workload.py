"""A file of TrainingArguments or an SFTConfig as a workload: each candidate is a trainer that is simulated."""

import json
import shutil
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import yaml

from hf_memopt.callbacks import attach
from hf_memopt.estimate.accounting.repeated_layers import Layers
from hf_memopt.estimate.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.integrations.transformers.argument_file import (
    MODEL_FIELDS,
    ArgumentFile,
    current_names,
    read_argument_file,
)
from hf_memopt.integrations.transformers.file_trainer import attention, make_trainer
from hf_memopt.integrations.transformers.trainer_batches import largest_window
from hf_memopt.integrations.transformers.trainer_estimate import trainer_step
from hf_memopt.jobs.accelerate_config import write_accelerate_config
from hf_memopt.jobs.equal_layers import equal_layers, told_by_few, under_offloading
from hf_memopt.jobs.huggingface import ACTIVATIONS
from hf_memopt.jobs.spec import JobSpec
from hf_memopt.jobs.transformers_models.model_config import read_config
from hf_memopt.jobs.transformers_models.tasks import TASKS, task_of
from hf_memopt.jobs.workload import Lever, divisors

_TOKEN_TASKS = ("causal", "masked", "seq2seq")
# Without selective checkpointing, for which Trainer has no field.
_CHOICES = tuple(name for name, (checkpointing, _) in ACTIVATIONS.items() if checkpointing != "selective")
_BATCH, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
# From a spec's fields to the file's.
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
# These say nothing about the training, or the workload takes them itself.
_OTHERS = {"training_args", "seq_len", "task", "effective_batch", "offload", "max_grad_norm", "gpu"}
_OTHERS |= {"host", "disk", "link", "check", "explain", "json", "timeline", "snapshot", "output", "workers"}
# A plan of the file takes these over; it chooses batches and checkpointing itself.
OF_FILES = (_FIELDS.keys() | _VALUES.keys() | {"seq_len", "task"}) - {"batch_size", "accumulation", "checkpointing"}


def file_workload(spec: JobSpec) -> "FileWorkload":
    assert spec.training_args is not None
    changes = _changes(spec)
    return FileWorkload(
        read_argument_file(spec.training_args),
        changes,
        seq_len=spec.seq_len,
        task=spec.task or "auto",
        effective_batch=spec.effective_batch,
    )


def _changes(spec: JobSpec) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in sorted(spec.said().items()):
        if name in _OTHERS:
            continue
        if name in _FIELDS:
            changes[_FIELDS[name]] = value
        elif name in _VALUES and value in _VALUES[name]:
            changes |= _VALUES[name][value]
        else:
            raise ValueError(f"{name}={value!s} has no field in training_args; leave one of the two out")
    if changes.get("attn_implementation") == "auto":
        changes["attn_implementation"] = None
    if "lora_r" in changes:
        changes["use_peft"] = True
    targets = changes.get("lora_target_modules", "all-linear")
    if targets != "all-linear":
        changes["lora_target_modules"] = targets.split(",")
    return changes


class FileWorkload:
    """Trains as a file says, on samples of one length without padding.

    Args:
        file: the fields.
        changes: fields that have other values than in the file.
        seq_len: tokens of each sample; None, the file's `max_length`.
        task: task of a plain Trainer's model; SFTTrainer's is causal.
        effective_batch: samples per update; None, as the fields give it.

    Raises:
        ValueError: no model or no length is named; the task's samples are no tokens; or a field or its value is not
            simulated.
    """

    levers = (Lever("activations", _CHOICES),)

    def __init__(
        self,
        file: ArgumentFile,
        changes: Mapping[str, Any],
        *,
        seq_len: int | None = None,
        task: str = "auto",
        effective_batch: int | None = None,
    ) -> None:
        if seq_len is not None and file.is_sft:
            changes = {**changes, "max_length": seq_len}
        self.file, self._changes = file, changes
        self._folder, self._offload = mkdtemp(prefix="hf_memopt-"), "off"
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._about = file.model_fields(changes)
        self.model = self._about["model_name_or_path"]
        if self.model is None:
            raise ValueError("name a model: model_name_or_path in the file, or on the command line")
        self._config = read_config(self.model)
        self._task = task_of(self._config, "causal" if file.is_sft else task, f"model={self.model!r}")
        if self._task not in _TOKEN_TASKS:
            raise ValueError(f"task={self._task!r}: its samples are not tokens; call estimate_trainer(trainer)")
        self.arguments = file.training_arguments(changes, self._folder)
        length = seq_len or getattr(self.arguments, "max_length", None)
        if length is None:
            raise ValueError("max_length is none, so samples may have any length; name one with seq_len")
        self._seq_len: int = length
        longest = getattr(self._config, "max_position_embeddings", None)
        if longest is not None and length > longest:
            raise ValueError(f"seq_len={length} is longer than the model's max_position_embeddings={longest}")
        self.micro_batch: int = self.arguments.per_device_train_batch_size
        self.effective_batch = effective_batch or self.micro_batch * self.arguments.gradient_accumulation_steps

    @property
    def name(self) -> str:
        """The trainer, the model, the length of samples, and the substitutions made."""
        trainer = "SFTTrainer" if self.file.is_sft else "Trainer"
        taken = "".join(f"; {note}" for note in self._taken())
        return f"{trainer} of {self.model} by {self.file.path.name}, {self._seq_len} tokens in each sample{taken}"

    @property
    def micro_batches(self) -> list[int]:
        return divisors(self.effective_batch)

    def as_given(self, offload: str = "off") -> SimulatedStep:
        """Return the update with the file's own batch and checkpointing.

        Args:
            offload: the option of `attach`: "off" or a mode of `ActivationOffloader`.

        Raises:
            ValueError: the file's batch is no divisor of `effective_batch`.
        """
        if self.effective_batch % self.micro_batch:
            raise ValueError(
                f"effective_batch={self.effective_batch} must be a multiple of {_BATCH}={self.micro_batch}"
            )
        return self._step({_ACCUMULATION: self.effective_batch // self.micro_batch}, offload)

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        return self._step(self._chosen(checkpointing, micro_batch), offload)

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        """Write an accelerate config, and the file with the chosen fields."""
        checkpointing, self._offload = ACTIVATIONS[settings["activations"]]
        precision = "bf16" if self.arguments.bf16 else "fp16" if self.arguments.fp16 else "no"
        # TrainingArguments have no fields for the model.
        changes = {k: v for k, v in self._changes.items() if self.file.is_sft or k not in MODEL_FIELDS}
        fields = dict(self.file.given) | current_names(changes | self._chosen(checkpointing, micro_batch))
        written = folder / self.file.path.name
        is_json = written.suffix == ".json"
        text = json.dumps(fields, indent=2) + "\n" if is_json else yaml.safe_dump(fields, sort_keys=False)
        written.write_text(text, encoding="utf-8")
        return [write_accelerate_config(folder / "accelerate.yaml", precision), written]

    def command(self, written: list[Path]) -> str:
        """Return TRL's script with the file, or a script of one's own; under `hf-memopt launch` where it offloads."""
        config, fields = written
        script = f"-m trl.scripts.sft --config {fields}" if self.file.is_sft else f"a script with {fields}"
        if self._offload == "off":
            return f"accelerate launch --config_file {config} {script}"
        return f"hf-memopt launch --config_file {config} --offload {self._offload} -- {script}"

    def _chosen(self, checkpointing: str, micro_batch: int) -> dict[str, Any]:
        return {
            _BATCH: micro_batch,
            _ACCUMULATION: self.effective_batch // micro_batch,
            "gradient_checkpointing": checkpointing == "full",
        }

    def _taken(self) -> list[str]:
        asked, nested = self._about["attn_implementation"], self._about["use_bnb_nested_quant"]
        notes = [f"{asked} taken for sdpa"] if asked != attention(self._about) else []
        return notes + (["use_bnb_nested_quant taken for false"] if nested and self._about["load_in_4bit"] else [])

    def _step(self, chosen: Mapping[str, Any], offload: str) -> SimulatedStep:
        changes = dict(self._changes) | dict(chosen)

        def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
            trainer = make_trainer(self.file, config, self._task, changes, self._seq_len, self._folder)
            if offload != "off":
                attach(trainer, offloader=offload, memory=False)
            window = largest_window(trainer, trainer.args.gradient_accumulation_steps)
            return trainer_step(trainer, window, repeated)

        # torchao's optimizers keep tables of their own.
        has_tables = self.arguments.optim in ("adamw_torch_8bit", "adamw_torch_4bit")
        layers = None if has_tables else under_offloading(self._equal_layers, offload)
        return told_by_few(step_of, self._config, layers)

    @cached_property
    def _equal_layers(self) -> Layers | None:
        with torch.device("meta"):
            return equal_layers(TASKS[self._task].build(self._config, f"model={self.model!r}"))
