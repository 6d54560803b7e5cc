"""One training run of a transformers or diffusers model: what trains, with which settings, and its simulated step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_memopt.planning.accounting.repeated_layers import Layers
from hf_memopt.planning.models.accelerate_config import ZERO3, shards_weights
from hf_memopt.planning.models.equal_layers import equal_layers, told_by_few, under_offloading
from hf_memopt.planning.models.model_config import preparing, training
from hf_memopt.planning.models.model_options import ModelOptions
from hf_memopt.planning.models.optimizers import WITH_TABLES, make_tables
from hf_memopt.planning.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.planning.simulation.quantised import quantised_base
from hf_memopt.planning.workload import OFF, num_steps
from hf_memopt.planning.workloads.argument_file import ArgumentFile
from hf_memopt.planning.workloads.file_trainer import make_trainer
from hf_memopt.planning.workloads.simulated_trainer import SimulatedTrainer, TrainerSwitches
from hf_memopt.planning.workloads.trainer_batches import TrainerWindow, largest_window
from hf_memopt.planning.workloads.trainer_fields import SYNCED_EACH_BATCH
from hf_memopt.units import GIB


@dataclass(frozen=True)
class TrainerRun:
    """A run.

    Attributes:
        file: fields of the trainer's settings, and the trainer that they are for.
        changes: fields that have other values than in the file.
        settings: the trainer's settings, with its defaults.
        options: the model, and all that the settings have no fields for.
        folder: an empty folder, for a trainer that wants one.
    """

    file: ArgumentFile
    changes: Mapping[str, Any]
    settings: TrainingArguments
    options: ModelOptions
    folder: str

    @property
    def micro_batch(self) -> int:
        return int(self.settings.per_device_train_batch_size)

    @property
    def passes(self) -> int:
        return int(self.settings.gradient_accumulation_steps)

    def make_trainer(self, config: Any) -> Trainer:
        return make_trainer(self.file, self.changes, self.options, config, self.folder)

    def step(self) -> SimulatedStep:
        options = self.options
        num_micro_batches = 1 if options.gradient_cache else min(2, self.passes)
        if options.optimizer in WITH_TABLES:
            make_tables()
        notes = tuple(_notes(options))
        layers = under_offloading(self._equal_layers, options.offload) if self._treats_layers_alike else None

        def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
            made: list[tuple[Trainer, TrainerWindow]] = []

            def build() -> None:
                trainer = self.make_trainer(config)
                made.append((trainer, self._window(trainer, config)))

            def setup(device: torch.device) -> tuple[Any, ...]:
                with preparing(options.source, options.sharing):
                    simulated = SimulatedTrainer(*made.pop(), device, options.sharing, self._switches)
                return simulated.modules, simulated.batches, simulated

            def update(state: Any) -> None:
                with training(options.source):
                    state[-1].step()

            return SimulatedStep(
                build=build,
                setup=setup,
                step=update,
                num_steps=num_steps(options.offload, num_micro_batches, options.home),
                num_micro_batches=num_micro_batches,
                repeated=repeated,
                num_gpus=options.num_gpus,
                has_group=options.sharing.has_group,
                assumptions=options.unsaid_sizes,
                notes=notes,
            )

        return told_by_few(step_of, options.config, layers)

    @property
    def switched(self) -> dict[str, Any]:
        """Return the flags of `hf-memopt launch` for what is switched on."""
        options = self.options
        flags = {
            "offload": options.offload if options.offload != "off" else None,
            "base": options.home if options.home != OFF else None,
            "trained": options.trained,
            "optimizer_home": options.optimizer_home if options.optimizer_home != "off" else None,
            "selective_checkpointing": options.checkpointing == "selective",
        }
        return {name: value for name, value in flags.items() if value}

    def as_mapping(self) -> dict[str, Any]:
        """Return the options, and the settings as flags of `TrainingArguments`."""
        options = self.options
        targets = options.lora_targets or options.kind_of_task.lora_targets(options.config)
        found = {each.name: getattr(options, each.name) for each in fields(options) if each.name != "read"}
        return found | {
            "task": options.kind,
            "base": options.home,
            "lora_targets": targets,
            "gradient_accumulation_steps": self.passes,
            "flags": self._flags(),
        }

    def _flags(self) -> dict[str, Any]:
        settings = self.settings
        flags = {
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.passes,
            "gradient_checkpointing": settings.gradient_checkpointing,
            "max_grad_norm": settings.max_grad_norm,
            "optim": getattr(settings.optim, "value", settings.optim),
            "bf16": settings.bf16,
            "fp16": settings.fp16,
        }
        if self.options.checkpointing == "reentrant":
            flags["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
        if self.options.sharing.offloads_by_fsdp:
            flags["accelerator_config"] = SYNCED_EACH_BATCH
        return flags

    @property
    def _switches(self) -> TrainerSwitches:
        options = self.options
        return TrainerSwitches(
            offload=options.offload,
            offload_threshold_mb=options.offload_threshold_mb,
            selective_checkpointing=options.checkpointing == "selective",
            base=options.home,
            base_budget_gib=options.base_budget_gib,
            trained=options.trained,
            optimizer_home=options.home_of_state,
        )

    def _window(self, trainer: Trainer, config: Any) -> TrainerWindow:
        """Return the batches of an update. Only those that run are made of rows; they are all the same."""
        count = trainer.args.gradient_accumulation_steps
        if self.file.trainer is None:
            return TrainerWindow([self.options.batch(config, self.micro_batch)] * count, count, is_all=True, moves=True)
        window = largest_window(trainer, count)
        missing = count - len(window.batches)
        return replace(window, batches=[*window.batches, *window.batches[-1:] * missing])

    @property
    def _treats_layers_alike(self) -> bool:
        """Return whether equal layers repeat each other: their memory is freed in the same order."""
        options = self.options
        # DDP cuts buckets across layers; FSDP2 gathers and frees otherwise at the ends, and DeepSpeed looks far ahead.
        differs = options.quantize == "int8-llm" or not options.published.treats_layers_alike
        # Which small weights stay depends on the whole model, and the next layers' are fetched ahead. State of small
        # parameters travels together.
        differs = differs or options.home != OFF or options.optimizer_home != "off"
        return not (differs or options.sharing.has_group or options.freeze_layers is not None)

    @property
    def _equal_layers(self) -> Layers | None:
        # Of a task with images no configuration with fewer layers can be made: it is of several models in one.
        return None if self.options.kind_of_task.image_options else equal_layers(self.options.without_memory)


def _notes(options: ModelOptions) -> Iterator[str]:
    """Yield remarks on options that do less than their names promise."""
    yield from _note_on_experts(options)
    yield from _note_on_loading(options)
    if options.engine == ZERO3 and options.lora_rank is not None and options.checkpointing == "reentrant":
        yield (
            "DeepSpeed 0.19 keeps frozen weights gathered until backward is over when checkpoints are reentrant; "
            "with --checkpointing full it does not."
        )
    if options.published.note:
        yield options.published.note.format(dtype=options.dtype)
    if options.quantize == "int8-llm" and (options.checkpointing in ("selective", "full") or options.offload != "off"):
        yield (
            "Layers of LLM.int8 keep their inputs themselves until backward is over: neither offloading nor "
            "checkpointing, unless it is reentrant, lowers these activations. nf4 and int8-torchao keep none."
        )


def _note_on_loading(options: ModelOptions) -> Iterator[str]:
    if options.quantize == "none" or not shards_weights(options.engine):
        return
    in_layers, _ = quantised_base.stored(options.without_memory, options.published.kept)
    others = sum(weight.numel() for weight in options.without_memory.parameters()) - in_layers
    num_bytes = in_layers * quantised_base.BYTES[options.quantize] + others * getattr(torch, options.dtype).itemsize
    yield (
        f"transformers loads quantised weights whole on each GPU, here {num_bytes / GIB:.1f} GiB, before "
        f"{options.engine} divides them: a card with less runs out of memory there. It divides them only with "
        f"BitsAndBytesConfig(bnb_4bit_quant_storage={options.packed_in!r})."
    )


def _note_on_experts(options: ModelOptions) -> Iterator[str]:
    if options.quantize in ("none", "nf4-experts") or options.kind == "denoising":
        return
    in_layers, in_experts = quantised_base.stored(options.without_memory, options.published.kept)
    if not in_experts:
        return
    dtype = "float32" if options.kbit_preparation == "peft" else options.dtype
    billions, of_all = in_experts / 1e9, (in_layers + in_experts) / 1e9
    yield (
        f"{options.quantize} leaves {billions:.1f} of {of_all:.1f} billion weights, the experts, in {dtype}: they are "
        "no linear layers in transformers 5. --quantize nf4-experts estimates them in 4 bits, as unsloth and "
        "bitsandbytes' Experts4bit store them."
    )
