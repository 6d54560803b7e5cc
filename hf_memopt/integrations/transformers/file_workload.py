"""A file of TrainingArguments or an SFTConfig as a workload: each candidate is a trainer that is simulated."""

import json
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import replace
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
    OPTIMIZERS,
    ArgumentFile,
    current_names,
    read_argument_file,
)
from hf_memopt.integrations.transformers.file_trainer import attention, make_trainer, storage
from hf_memopt.integrations.transformers.trainer_batches import largest_window
from hf_memopt.integrations.transformers.trainer_estimate import trainer_step
from hf_memopt.integrations.transformers.trl_trainers import TRL, need_trl
from hf_memopt.jobs import sft_fields
from hf_memopt.jobs.accelerate_config import write_accelerate_config
from hf_memopt.jobs.equal_layers import equal_layers, told_by_few, under_offloading
from hf_memopt.jobs.model_levers import ACTIVATIONS
from hf_memopt.jobs.spec import NOT_CLIPPED, JobSpec
from hf_memopt.jobs.transformers_models.adapters import ALL_LINEAR
from hf_memopt.jobs.transformers_models.model_config import read_config, unsaid_sizes
from hf_memopt.jobs.transformers_models.optimizers import make_tables
from hf_memopt.jobs.transformers_models.published_weights import published_weights
from hf_memopt.jobs.transformers_models.tasks import TASKS, task_of
from hf_memopt.jobs.workload import Lever, divisors
from hf_memopt.ranges import Range

_TOKEN_TASKS = ("causal", "masked", "seq2seq")
# Without selective checkpointing, for which Trainer has no field.
_CHOICES = tuple(name for name, (checkpointing, _) in ACTIVATIONS.items() if checkpointing != "selective")
# Simulated trainers make adapters, and the data of a batch, in host memory.
_SIZE = Range(at_least=1, at_most=2**16, whole=True)
_LENGTH = Range(at_least=1, at_most=2**27, whole=True)
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
    "max_grad_norm": "max_grad_norm",
}
_VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "precision": {name: {"bf16": name == "bf16", "fp16": name == "fp16"} for name in ("no", "bf16", "fp16")},
    "checkpointing": {name: {"gradient_checkpointing": name == "full"} for name in ("none", "full")},
    "quantize": {"auto": {}}
    | {
        name: {
            "load_in_4bit": name.startswith("nf4"),
            "load_in_8bit": name == "int8",
            "use_bnb_nested_quant": name == "nf4-double",
        }
        for name in ("none", "nf4", "nf4-double", "int8")
    },
    "optimizer": {planned: {"optim": name} for name, planned in sft_fields.OPTIMIZERS.items() if name in OPTIMIZERS},
}
# These say nothing about the training, or the workload takes them itself.
_OTHERS = {"training_args", "trainer", "seq_len", "task", "effective_batch", "offload", "gpu"}
_OTHERS |= {"reserve", "host", "disk", "link", "check", "explain", "json", "timeline", "snapshot", "output", "workers"}
# A plan of the file takes these over; it chooses batches and checkpointing itself.
OF_FILES = _FIELDS.keys() | _VALUES.keys() | {"trainer", "seq_len", "task"}
OF_FILES -= {"batch_size", "accumulation", "checkpointing"}


def file_workload(spec: JobSpec) -> "FileWorkload":
    """Make the workload of a file; without one, of the defaults of the trainer that is named."""
    changes = _changes(spec)
    if spec.training_args is not None:
        file = read_argument_file(spec.training_args, spec.trainer)
    else:
        need_trl(f"trainer={spec.trainer!r}")
        file = ArgumentFile(trainer=TRL[str(spec.trainer)])
    batch = spec.effective_batch
    return FileWorkload(file, changes, seq_len=spec.seq_len, task=spec.task or "auto", effective_batch=batch)


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
            owner = f"trainer={spec.trainer}" if spec.training_args is None else "training_args"
            raise ValueError(f"{name}={value!s} has no field in {owner}; leave one of the two out")
    if changes.get("attn_implementation") == "auto":
        changes["attn_implementation"] = None
    if "max_grad_norm" in changes:
        changes["max_grad_norm"] = 0.0 if changes["max_grad_norm"] == NOT_CLIPPED else changes["max_grad_norm"]
    if "lora_r" in changes:
        changes["use_peft"] = True
        if spec.training_args is None:
            changes.setdefault("lora_target_modules", ALL_LINEAR)
    targets = changes.get("lora_target_modules", ALL_LINEAR)
    if targets != ALL_LINEAR:
        changes["lora_target_modules"] = targets.split(",")
    return changes


def _usual(file: ArgumentFile, seq_len: int | None) -> dict[str, Any]:
    """Return the fields that a length sets, and those without which a trainer's adapters do not train its head."""
    if file.trainer is None:
        return {}
    usual: dict[str, Any] = {} if seq_len is None or not file.trainer.truncates else {"max_length": seq_len}
    if file.trainer.task == "sequence-classification" and "lora_task_type" not in file.given:
        usual["lora_task_type"] = "SEQ_CLS"
    return usual


class FileWorkload:
    """Trains as a file says, on samples of one length without padding.

    Args:
        file: the fields.
        changes: fields that have other values than in the file.
        seq_len: tokens of each sample; None, the file's `max_length`.
        task: task of a plain Trainer's model; those of TRL have their own.
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
        self.file, self._folder, self._offload = file, mkdtemp(prefix="hf_memopt-"), "off"
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._changes = {**changes, **_usual(file, seq_len)}
        self._about = file.model_fields(self._changes)
        self.model = self._about["model_name_or_path"]
        if self.model is None:
            raise ValueError("name a model: model_name_or_path in the file, or on the command line")
        self._config = read_config(self.model)
        self._published = published_weights(self._config, f"model={self.model!r}")
        self._storage = storage(self._about, self._config)
        if self._storage is not None and not self._about["use_peft"]:
            raise ValueError(
                f"model={self.model!r} is stored in {self._storage}, which does not train; give lora_rank, such as "
                "lora_rank=16, for adapters on it"
            )
        self._task = self._task_of(task)
        self.arguments = file.training_arguments(self._changes, self._folder)
        self.tokens_per_sample = self._length(seq_len)
        self.micro_batch: int = self.arguments.per_device_train_batch_size
        limited = {"lora_r": self._about["lora_r"], _BATCH: self.micro_batch}
        for name, value in limited.items():
            _SIZE.check(name, value)
        self.effective_batch = effective_batch or self.micro_batch * self.arguments.gradient_accumulation_steps

    def _task_of(self, task: str) -> str:
        if self.file.trainer is None:
            found = task_of(self._config, task, f"model={self.model!r}")
            if found not in _TOKEN_TASKS:
                raise ValueError(f"task={found!r}: its samples are not tokens; call estimate_trainer(trainer)")
            return found
        if self.file.trainer.task == "sequence-classification":
            self._config.num_labels = 1  # the score, as RewardTrainer has it
        return task_of(self._config, self.file.trainer.task, f"model={self.model!r}")

    def _length(self, seq_len: int | None) -> int:
        length: int | None = seq_len or getattr(self.arguments, "max_length", None)
        if length is None:
            is_cut = self.file.trainer is None or self.file.trainer.truncates
            what = "max_length is none, so samples" if is_cut else "prompts"
            more = "one" if is_cut else "that of prompt and completion together"
            raise ValueError(f"{what} may have any length; name {more} with seq_len")
        _LENGTH.check("max_length" if seq_len is None else "seq_len", length)
        longest = getattr(self._config, "max_position_embeddings", None)
        if longest is not None and length > longest:
            raise ValueError(f"seq_len={length} is longer than the model's max_position_embeddings={longest}")
        return length

    @property
    def name(self) -> str:
        """The trainer, the model, the length of samples, and the substitutions made."""
        trainer, tokens = self.file.trainer, f"{self.tokens_per_sample} tokens in each sample"
        samples = tokens if trainer is None else trainer.describe(self.arguments, self.tokens_per_sample)
        source = "" if self.file.path is None else f" by {self.file.path.name}"
        taken = "".join(f"; {note}" for note in self._taken())
        return f"{self.file.trainer_name} of {self.model}{source}, {samples}{taken}"

    @property
    def micro_batches(self) -> list[int]:
        whole, trainer = self._generation_batch or self.effective_batch, self.file.trainer
        least = 1 if trainer is None else trainer.least_batch(self.arguments)
        return [each for each in divisors(self.effective_batch) if each >= least and whole % each == 0]

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
        is_of_trl = self.file.trainer is not None
        changes = {k: v for k, v in self._changes.items() if is_of_trl or k not in MODEL_FIELDS}
        changes = current_names(changes | self._chosen(checkpointing, micro_batch))
        # None is the default of those that change.
        fields = {k: v for k, v in (dict(self.file.given) | changes).items() if v is not None or k not in changes}
        written = folder / self.file.name
        is_json = written.suffix == ".json"
        text = json.dumps(fields, indent=2) + "\n" if is_json else yaml.safe_dump(fields, sort_keys=False)
        written.write_text(text, encoding="utf-8")
        return [write_accelerate_config(folder / "accelerate.yaml", precision), written]

    def command(self, written: list[Path]) -> str:
        """Return TRL's script with the file, or a script of one's own; under `hf-memopt launch` where it offloads."""
        config, fields = written
        script = f"a script with {fields}"
        if self.file.trainer is not None:
            lacking = self.file.trainer.lacking(self.file.given)
            script = f"-m {self.file.trainer.module} --config {fields}{lacking}"
        if self._offload == "off":
            return f"accelerate launch --config_file {config} {script}"
        return f"hf-memopt launch --config_file {config} --offload {self._offload} -- {script}"

    def _chosen(self, checkpointing: str, micro_batch: int) -> dict[str, Any]:
        chosen = {
            _BATCH: micro_batch,
            _ACCUMULATION: self.effective_batch // micro_batch,
            "gradient_checkpointing": checkpointing == "full",
        }
        if self._generation_batch is None:
            return chosen
        return chosen | {"generation_batch_size": self._generation_batch, "steps_per_generation": None}

    @property
    def _generation_batch(self) -> int | None:
        """Return the completions of one generation; None if there are none, or as many as samples in an update."""
        says = any(self.file.given.get(name) for name in ("generation_batch_size", "steps_per_generation"))
        return self.arguments.generation_batch_size if says else None

    def _taken(self) -> list[str]:
        asked = self._about["attn_implementation"]
        notes = [f"{asked} taken for sdpa"] if asked != attention(self._about) else []
        if self.file.trainer is not None:
            notes += self.file.trainer.notes(self.arguments, is_quantised=self._storage is not None)
        if self._published.quantize != "none":
            notes.append(f"{self._storage}, as the checkpoint says")
        if self._published.note:
            notes.append("weights in MXFP4 taken as dequantised")
        if self.file.path is None:
            notes.append(f"{self.micro_batch} per forward pass")
        return notes

    def _step(self, chosen: Mapping[str, Any], offload: str) -> SimulatedStep:
        changes = dict(self._changes) | dict(chosen)

        def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
            trainer = make_trainer(self.file, config, self._task, changes, self.tokens_per_sample, self._folder)
            if offload != "off":
                attach(trainer, offloader=offload, memory=False)
            window = largest_window(trainer, trainer.args.gradient_accumulation_steps)
            return trainer_step(trainer, window, repeated)

        if self.arguments.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
            make_tables()
        layers = under_offloading(self._equal_layers, offload)
        return replace(told_by_few(step_of, self._config, layers), assumptions=unsaid_sizes(self.model, self._config))

    @cached_property
    def _equal_layers(self) -> Layers | None:
        if not self._published.treats_layers_alike:
            return None
        with torch.device("meta"):
            return equal_layers(TASKS[self._task].build(self._config, f"model={self.model!r}"))
