"""The training of a model by flags, and of a file of arguments, as a workload: each candidate is a real trainer."""

import copy
import json
import shlex
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from hf_memopt.planning.job import DEFAULTS, PLAIN_TRAINER, Job
from hf_memopt.planning.models.accelerate_config import OPTIMIZERS_OF_BITSANDBYTES, write_accelerate_config
from hf_memopt.planning.models.model_config import read_config
from hf_memopt.planning.models.model_options import OF_BITSANDBYTES, ModelOptions
from hf_memopt.planning.models.pipelines import DenoiserConfig
from hf_memopt.planning.models.tasks import CONTRASTIVE, task_of
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.workload import PLACES, Lever, check_accumulation, divisors
from hf_memopt.planning.workloads import trainer_fields
from hf_memopt.planning.workloads.argument_file import (
    MODEL_FIELDS,
    ArgumentFile,
    current_names,
    read_argument_file,
)
from hf_memopt.planning.workloads.model_levers import (
    ACTIVATIONS,
    ADAPTIVE,
    Changes,
    check_varied,
    choices_of,
    has_experts,
)
from hf_memopt.planning.workloads.trainer_run import TrainerRun
from hf_memopt.planning.workloads.trl_trainers import TRL, need_trl
from hf_memopt.ranges import Range

# Simulated trainers make adapters, and the data of a batch, in host memory.
_SIZE = Range(at_least=1, at_most=2**16, whole=True)
_LENGTH = Range(at_least=1, at_most=2**27, whole=True)
_MOST_TOKENS = 2**25
# TrainingArguments'.
_USUAL_BATCH = 8
_BATCH, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
# Of a spec, the options for which trainers have no fields.
_OWN = {each.name for each in fields(ModelOptions)} - trainer_fields.TAKEN


def _file_of(job: Job) -> ArgumentFile:
    """Return the file of arguments; of a MODEL with flags an empty one, for SFTTrainer or, if no LLM, for Trainer."""
    if job.training_args is not None:
        return read_argument_file(job.training_args, job.trainer)
    if job.trainer == PLAIN_TRAINER or (job.trainer is None and job.loss == "full"):
        return ArgumentFile()
    if job.trainer is not None:
        need_trl(f"trainer={job.trainer!r}")
        return ArgumentFile(trainer=TRL[job.trainer])
    if not job.model:
        raise ValueError("name a MODEL (hub id, folder or config.json), or a recipe with its config, or training_args")
    if task_of(read_config(job.model), job.task or "auto", f"model={job.model!r}") != "causal":
        return ArgumentFile()
    need_trl(f"model={job.model!r} is trained by TRL's SFTTrainer, or with trainer={PLAIN_TRAINER!r} without TRL")
    return ArgumentFile(trainer=TRL["sft"])


class TrainerWorkload:
    """Trains as a spec says, on samples of one length without padding.

    Raises:
        ValueError: no model or no length is named; or a field or its value is not simulated.
    """

    def __init__(self, job: Job, file: ArgumentFile | None = None, offload_threshold_mb: float = 10.0) -> None:
        for name in ("recipe", "config"):
            if (asked := getattr(job, name)) is not None:
                raise ValueError(f"{name}={str(asked)!r} with a trainer or training_args: name one of them")
        if job.set:
            raise ValueError(f"set={job.set[0]!r} is for recipes and robot policies; a model's settings have own flags")
        self._job, self.file, self._folder = job, file or _file_of(job), mkdtemp(prefix="hf_memopt-")
        self._threshold_mb = offload_threshold_mb
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._varied = check_varied(job.vary)
        if self.file.trainer is not None:
            _ = self.file.trainer.kind  # imported before processes are forked
        self._is_of_flags = job.training_args is None and file is None
        self.given = self._written = self._run(job)
        options = self.given.options
        self.micro_batch = options.micro_batch
        self.effective_batch = options.effective_batch

    # ------------------------------------------------------------------------------------------------- one candidate

    def _run(self, job: Job, **fields: Any) -> TrainerRun:
        """Return the run of a spec; `fields` of the trainer's settings win over it."""
        file = self.file
        changes = {**trainer_fields.of_job(job), **fields}
        if self._is_of_flags:
            changes = {"dtype": "auto"} | changes
        if job.effective_batch is not None:
            share = job.effective_batch // (job.num_gpus or 1)
            if _BATCH not in changes and not self.file.given.get(_BATCH):
                changes[_BATCH] = max((each for each in divisors(share) if each <= _USUAL_BATCH), default=1)
            changes[_ACCUMULATION] = self._accumulation(job, changes)
        changes |= self._usual(changes)
        about = file.model_fields(changes)
        if about["model_name_or_path"] is None:
            raise ValueError("name a model: model_name_or_path in the file, or on the command line")
        if about["use_peft"]:
            _SIZE.check("lora_r", about["lora_r"])
        elif about["lora_modules_to_save"]:
            names = ",".join(about["lora_modules_to_save"])
            raise ValueError(f"modules_to_save={names!r}: for adapters; give lora_rank, such as lora_rank=16")
        settings = file.training_arguments(changes, self._folder)
        _SIZE.check(_BATCH, settings.per_device_train_batch_size)
        return TrainerRun(file, changes, settings, self._options(job, about, settings), self._folder)

    @cached_property
    def _read(self) -> Any:
        """The model's configuration, which all candidates have."""
        about = self.file.model_fields(trainer_fields.of_job(self._job))
        config = read_config(about["model_name_or_path"])
        if self.file.trainer is not None and self.file.trainer.task == "sequence-classification":
            config.num_labels = 1  # the score, as RewardTrainer has it
        return config

    def _accumulation(self, job: Job, changes: Mapping[str, Any]) -> int:
        given = dict(self.file.given) | dict(changes)
        micro_batch, num_gpus = int(given[_BATCH]), job.num_gpus or 1
        passes, rest = divmod(int(job.effective_batch or 1), micro_batch * num_gpus)
        if rest or not passes:
            ranks = f" times num_gpus={num_gpus}" if num_gpus > 1 else ""
            raise ValueError(
                f"effective_batch={job.effective_batch} must be a multiple of {_BATCH}={micro_batch}{ranks}"
            )
        check_accumulation(job.accumulation, passes, int(job.effective_batch or 1), micro_batch)
        return passes

    def _usual(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a model needs: autocast, as diffusers' scripts are run, and those of adapters.

        Experts have no dropout, and a head of classes trains.
        """
        trainer = self.file.trainer
        usual: dict[str, Any] = {}
        if trainer is None:
            is_unsaid = self._job.dtype in (None, "auto") and changes.keys().isdisjoint(("bf16", "fp16"))
            return {"bf16": True} if is_unsaid and isinstance(self._read, DenoiserConfig) else {}
        if self._is_of_flags and "lora_r" in changes and self._job.model is not None and has_experts(self._read):
            usual["lora_dropout"] = 0.0  # PEFT has none on the experts' weights
        if trainer.task == "sequence-classification" and "lora_task_type" not in self.file.given:
            usual["lora_task_type"] = "SEQ_CLS"
        return usual

    def _options(self, job: Job, about: Mapping[str, Any], settings: Any) -> ModelOptions:
        trainer, said = self.file.trainer, job.said()
        config = copy.deepcopy(self._read)  # models that are built from it write to it
        own = {name: value for name, value in said.items() if name in _OWN}
        quantize = self._quantize(job, about)
        if self.file.tool is not None and quantize in OF_BITSANDBYTES:
            own.setdefault("kbit_preparation", "none")  # adapters are float32, as PEFT makes them
        micro_batch, passes = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
        is_said = trainer is not None or job.lora_targets or self.file.tool is not None
        targets = about["lora_target_modules"] if is_said else None
        asked = about["attn_implementation"]
        return ModelOptions(
            model=about["model_name_or_path"],
            read=config,
            task=(job.task or "auto") if trainer is None else trainer.task,
            trainer=None if trainer is None else trainer.name,
            loss=job.loss or ("full" if trainer is None or trainer.name != "sft" else "chunked"),
            seq_len=self._length(settings, config),
            micro_batch=micro_batch,
            effective_batch=micro_batch * passes * (job.num_gpus or 1),
            dtype=about["dtype"] or "float32",
            quantize=quantize,
            # Kernels that are not here hold as much as torch's flash attention.
            attention="auto" if asked is None else asked if asked == "eager" else "sdpa",
            lora_rank=about["lora_r"] if about["use_peft"] else None,
            lora_targets=",".join(targets) if isinstance(targets, list) else targets,
            use_dora=bool(about["use_dora"]),
            offload_threshold_mb=self._threshold_mb,
            **trainer_fields.to_options(settings, job.checkpointing == "selective"),
            **own,
        )

    def _quantize(self, job: Job, about: Mapping[str, Any]) -> str:
        if job.quantize not in (None, "auto"):
            return str(job.quantize)
        if about["load_in_4bit"]:
            return "nf4-double" if about["use_bnb_nested_quant"] else "nf4"
        return "int8-llm" if about["load_in_8bit"] else "auto"

    def _length(self, settings: Any, config: Any) -> int:
        said = self._job.seq_len
        length: int | None = said or getattr(settings, "max_length", None) or self.file.given.get("max_length")
        if length is None and self._is_of_flags and self.file.trainer is None:
            length = int(DEFAULTS["seq_len"])
        if length is None:
            is_cut = self.file.trainer is None or self.file.trainer.truncates
            what = "max_length is none, so samples" if is_cut else "prompts"
            more = "one" if is_cut else "that of prompt and completion together"
            raise ValueError(f"{what} may have any length; name {more} with seq_len")
        name = "max_length" if said is None else "seq_len"
        _LENGTH.check(name, length)
        samples = settings.per_device_train_batch_size
        if samples * length > _MOST_TOKENS:
            raise ValueError(
                f"{name}={length} in batches of {samples}: more than {_MOST_TOKENS:,} tokens in a forward pass are not "
                "simulated; use a smaller batch, or shorter samples"
            )
        return length

    # ------------------------------------------------------------------------------------------------- the workload

    @property
    def name(self) -> str:
        """The trainer, the model, the length of samples, and the substitutions made."""
        options, trainer = self.given.options, self.file.trainer
        images = options.kind_of_task.describe(options.config, options.sample)
        if trainer is None:
            what = f"{options.kind_of_task.class_name(options.config)} in {self._weights}{images and f' {images}'}"
            has_length = options.kind_of_task.positions is not None and not images
            samples = f", {options.seq_len:,} tokens in each sample" if has_length else ""
        else:
            what, samples = f"{self._weights}", f", {trainer.describe(self.given.settings, options.seq_len)}"
        source = "" if self.file.path is None else f" by {self.file.path.name}"
        parts = [str(options.sharing)] if options.sharing.has_group else []
        parts += [f"weights and gradients {PLACES[options.home]}"] if options.trained else []
        parts += [] if options.home_of_state == "off" else [f"optimizer's state {PLACES[options.home_of_state]}"]
        taken = "".join(f"; {note}" for note in self._taken())
        more = "".join(f", {part}" for part in parts)
        by = "" if options.kind_of_task.has_own_loss else f"{self.file.trainer_name} of "
        return f"{by}{options.model} as {what}{source}{samples}{more}{taken}"

    @property
    def _weights(self) -> str:
        """Return the dtypes of the weights, and which library loads those that bitsandbytes has not quantised."""
        options = self.given.options
        if options.quantize == "none":
            return options.dtype
        quantised = options.quantize + (", as the checkpoint says" if options.published.quantize != "none" else "")
        if options.kbit_preparation == "peft" and options.quantize in OF_BITSANDBYTES:
            return f"{quantised}, the rest in float32 (PEFT's preparation)"
        return f"{quantised}, the rest in {options.dtype}"

    def _taken(self) -> list[str]:
        about = self.file.model_fields(self.given.changes)
        asked, options = about["attn_implementation"], self.given.options
        notes = [f"{asked} taken for sdpa"] if asked not in (None, "eager", "sdpa") else []
        if self.file.trainer is not None:
            notes += self.file.trainer.notes(self.given.settings, is_quantised=options.quantize != "none")
        if self.file.tool is not None and self.file.unread:
            notes.append(f"{self.file.tool.name}'s {', '.join(self.file.unread)} not looked at")
        if self.file.path is None and self._job.batch_size is None and self._job.effective_batch is None:
            notes.append(f"{self.micro_batch} per forward pass")
        return notes

    @property
    def tokens_per_sample(self) -> int | None:
        options = self.given.options
        texts = 1 + options.passages if options.kind == CONTRASTIVE else 1
        return texts * options.seq_len if options.kind_of_task.positions or self.file.trainer else None

    @property
    def packages(self) -> list[str]:
        """Return those that the run needs that was written last."""
        options = self._written.options
        needed = {
            "trl": self.file.trainer is not None,
            "peft": options.lora_rank is not None,
            "bitsandbytes": options.quantize in OF_BITSANDBYTES or options.optimizer in OPTIMIZERS_OF_BITSANDBYTES,
            "torchao": options.quantize == "int8-torchao" or options.optimizer in ("adamw-8bit", "adamw-4bit"),
            "deepspeed": options.sharing.is_zero,
            "diffusers": options.kind == "denoising",
            "sentence-transformers": options.kind == CONTRASTIVE,
        }
        return [name for name, is_needed in needed.items() if is_needed]

    @cached_property
    def _choices(self) -> Mapping[str, Mapping[str, Changes]]:
        return choices_of(self.given.options, self._varied)

    @property
    def levers(self) -> tuple[Lever, ...]:
        return tuple(Lever.of(name, ways, ADAPTIVE) for name, ways in self._choices.items())

    @property
    def micro_batches(self) -> list[int]:
        """Return the sizes that train the same: a contrastive loss of parts is another, but for a gradient cache."""
        options, trainer = self.given.options, self.file.trainer
        share = self.effective_batch // options.num_gpus
        if options.kind == CONTRASTIVE and not options.gradient_cache:
            return [share]
        whole = self._generation_batch or share
        least = 1 if trainer is None else trainer.least_batch(self.given.settings)
        return [each for each in divisors(share) if each >= least and whole % each == 0]

    def as_given(self) -> SimulatedStep:
        """Return the update with the spec's own batch and checkpointing."""
        return self.given.step()

    def chosen(self, settings: Mapping[str, Any], micro_batch: int) -> TrainerRun:
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            changes |= self._choices[name][value]
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        share = self.effective_batch // self.given.options.num_gpus
        changes |= {"batch_size": micro_batch, "accumulation": share // micro_batch, "effective_batch": None}
        job = replace(self._job, checkpointing=checkpointing, offload=offload, **changes)
        return self._run(job, **self._generation)

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        return self.chosen(settings, micro_batch).step()

    @property
    def _generation(self) -> dict[str, Any]:
        batch = self._generation_batch
        return {} if batch is None else {"generation_batch_size": batch, "steps_per_generation": None}

    @property
    def _generation_batch(self) -> int | None:
        """Return the completions of one generation, or None where the file leaves that to the trainer."""
        says = any(self.file.given.get(name) for name in ("generation_batch_size", "steps_per_generation"))
        return self.given.settings.generation_batch_size if says else None

    # ------------------------------------------------------------------------------------------------- its command

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        """Write an accelerate config, and the file of a trainer of TRL or of the recipe, or the settings as JSON."""
        self._written = run = self.chosen(settings, micro_batch)
        options, launch = run.options, folder / "accelerate.yaml"
        write_accelerate_config(launch, options.precision, options.sharing, run.passes, options.max_grad_norm)
        if self.file.trainer is not None or self.file.path is not None:
            return [launch, self._write_fields(run, folder)]
        chosen, described = run.as_mapping(), folder / "settings.json"
        of_script = options.kind_of_task.write_files(chosen, options.config, folder)
        described.write_text(json.dumps(chosen | of_script, indent=2) + "\n", encoding="utf-8")
        return [launch, described, *map(Path, of_script.values())]

    def _write_fields(self, run: TrainerRun, folder: Path) -> Path:
        # TrainingArguments have no fields for the model.
        is_of_trl = self.file.trainer is not None
        renamed = () if self.file.tool is None else self.file.tool.renamed.values()
        changes = {k: v for k, v in run.changes.items() if is_of_trl or k not in MODEL_FIELDS or k in renamed}
        if run.options.sharing.offloads_by_fsdp:
            changes["accelerator_config"] = trainer_fields.SYNCED_EACH_BATCH
        if self._is_recipe:
            changes = trainer_fields.of_recipe(run.options, changes)
        changes = current_names(changes)
        # None is the default of those that change.
        fields = {k: v for k, v in (dict(self.file.given) | changes).items() if v is not None or k not in changes}
        if self.file.tool is not None:
            fields = dict(self.file.original) | self.file.tool.own_fields(changes)
        written = folder / ("sft.yaml" if self._is_recipe else self.file.name)
        is_json = written.suffix == ".json"
        text = json.dumps(fields, indent=2) + "\n" if is_json else yaml.safe_dump(fields, sort_keys=False)
        written.write_text(text, encoding="utf-8")
        return written

    @property
    def _is_recipe(self) -> bool:
        return self._is_of_flags and self._job.trainer is None and self.file.trainer is not None

    def command(self, written: list[Path]) -> str:
        """Return the recipe or TRL's script with the file, or a script of one's own; `write` comes first."""
        config, fields, *_ = written
        launched, run = f"--config_file {shlex.quote(str(config))}", self._written
        if self._is_recipe:
            return f"accelerate launch {launched} -m hf_memopt.recipes.train_sft --config {shlex.quote(str(fields))}"
        if self.file.trainer is not None:
            lacking = self.file.trainer.lacking(self.file.given)
            script = f"-m {self.file.trainer.module} --config {shlex.quote(str(fields))}{lacking}"
        elif self.file.tool is not None:
            script = f"-m {self.file.tool.module} {shlex.quote(str(fields))}"
        elif self.file.path is not None:
            script = f"a script with {fields}"
        else:
            chosen = json.loads(fields.read_text(encoding="utf-8"))
            script = run.options.kind_of_task.script(chosen, run.options.config)
        flags = "".join(f" --{name}" if value is True else f" --{name} {value}" for name, value in run.switched.items())
        return f"hf-memopt launch {launched}{flags} -- {script}" if flags else f"accelerate launch {launched} {script}"
