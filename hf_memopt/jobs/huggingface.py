"""A transformers model as a workload: built from its configuration alone and trained through Accelerate."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from hf_memopt.estimate.accounting.repeated_layers import Layers
from hf_memopt.estimate.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.estimate.simulation.quantised import quantised_base
from hf_memopt.jobs import accelerate_config
from hf_memopt.jobs.accelerate_config import NVME, ZERO3, Sharing
from hf_memopt.jobs.equal_layers import equal_layers, told_by_few, under_offloading
from hf_memopt.jobs.model_levers import ACTIVATIONS, Changes, check_varied, choices_of
from hf_memopt.jobs.sft_fields import can_train, fields_of
from hf_memopt.jobs.transformers_models.model_options import OF_BITSANDBYTES, ModelOptions, check_choice
from hf_memopt.jobs.transformers_models.model_update import ModelUpdate
from hf_memopt.jobs.transformers_models.optimizers import WITH_TABLES, make_tables
from hf_memopt.jobs.transformers_models.tasks import CONTRASTIVE
from hf_memopt.jobs.workload import RESIDENT, Lever, divisors, num_steps
from hf_memopt.units import GIB

_HOMES = {"host": "on the host", "file": "in a file"}


@dataclass(frozen=True)
class HuggingFaceModel(ModelOptions):
    """A model with the levers that `vary` names; see `ModelOptions` for the rest.

    Attributes:
        vary: names of levers beside activations, such as "optimizer,loss"; None, the base of adapters alone.
    """

    vary: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_varied(self.vary)

    @cached_property
    def _choices(self) -> Mapping[str, Mapping[str, Changes]]:
        return choices_of(self, check_varied(self.vary))

    @property
    def levers(self) -> tuple[Lever, ...]:
        return tuple(Lever.of(name, ways) for name, ways in self._choices.items())

    @property
    def name(self) -> str:
        images = self.kind_of_task.describe(self.config, self.sample)
        parts = [str(self.sharing)] if self.sharing.has_group else []
        parts += [f"weights and gradients {_HOMES[self.home]}"] if self.trained else []
        parts += [] if self.home_of_state == "off" else [f"optimizer's state {_HOMES[self.home_of_state]}"]
        return (
            f"{self.model} as {self.kind_of_task.class_name(self.config)} in {self._weights}{images and f' {images}'}"
            f"{''.join(f', {part}' for part in parts)}"
        )

    @property
    def _weights(self) -> str:
        """Return the dtypes of the weights, and which library loads those that bitsandbytes has not quantised."""
        if self.quantize == "none":
            return self.dtype
        quantised = self.quantize + (", as the checkpoint says" if self.published.quantize != "none" else "")
        if self.quantize not in OF_BITSANDBYTES:
            return f"{quantised}, the rest in {self.dtype}"
        if self.kbit_preparation == "peft":
            return f"{quantised}, the rest in float32 (PEFT's preparation)"
        loaded = " (as TRL loads it)" if self.kbit_preparation == "trl" else ""
        return f"{quantised}, the rest in {self.dtype}{loaded}"

    def _notes(self, checkpointing: str, offload: str) -> Iterator[str]:
        """Yield remarks on options that do less than their names promise."""
        yield from self._note_on_experts()
        yield from self._note_on_loading()
        if self.engine == ZERO3 and self.lora_rank is not None and checkpointing == "reentrant":
            yield (
                "DeepSpeed 0.19 keeps frozen weights gathered until backward is over when checkpoints are reentrant; "
                "with --checkpointing full it does not."
            )
        if self.published.note:
            yield self.published.note.format(dtype=self.dtype)
        if self.quantize == "int8" and (checkpointing in ("selective", "full") or offload != "off"):
            yield (
                "Layers of LLM.int8 keep their inputs themselves until backward is over: neither offloading nor "
                "checkpointing, unless it is reentrant, lowers these activations. nf4 and int8-torchao keep none."
            )

    def _note_on_loading(self) -> Iterator[str]:
        if self.quantize == "none" or not accelerate_config.shards_weights(self.engine):
            return
        in_layers, _ = quantised_base.stored(self._without_memory, self.published.kept)
        others = sum(weight.numel() for weight in self._without_memory.parameters()) - in_layers
        num_bytes = in_layers * quantised_base.BYTES[self.quantize] + others * getattr(torch, self.dtype).itemsize
        yield (
            f"transformers loads quantised weights whole on each GPU, here {num_bytes / GIB:.1f} GiB, before "
            f"{self.engine} divides them: a card with less runs out of memory there. It divides them only with "
            f"BitsAndBytesConfig(bnb_4bit_quant_storage={self.packed_in!r})."
        )

    def _note_on_experts(self) -> Iterator[str]:
        if self.quantize in ("none", "nf4-experts") or self.kind == "denoising":
            return
        in_layers, in_experts = quantised_base.stored(self._without_memory, self.published.kept)
        if not in_experts:
            return
        dtype = "float32" if self.kbit_preparation == "peft" else self.dtype
        billions, of_all = in_experts / 1e9, (in_layers + in_experts) / 1e9
        yield (
            f"{self.quantize} leaves {billions:.1f} of {of_all:.1f} billion weights, the experts, in {dtype}: they are "
            "no linear layers in transformers 5. --quantize nf4-experts estimates them in 4 bits, as unsloth and "
            "bitsandbytes' Experts4bit store them."
        )

    @property
    def tokens_per_sample(self) -> int | None:
        texts = 1 + self.passages if self.kind == CONTRASTIVE else 1
        return texts * self.seq_len if self.kind_of_task.positions else None

    @property
    def micro_batches(self) -> list[int]:
        """Return the sizes that train the same: a contrastive loss of parts is another, but for a gradient cache."""
        share = self.effective_batch // self.num_gpus
        is_whole = self.optimizer_in_backward or (self.kind == CONTRASTIVE and not self.gradient_cache)
        return [share] if is_whole else divisors(share)

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        return self.with_settings(settings).step_with(*ACTIVATIONS[settings["activations"]], micro_batch)

    def with_settings(self, settings: Mapping[str, Any]) -> "HuggingFaceModel":
        """Return the model with other options, as levers say; refuse those that do not go together."""
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            changes |= self._choices[name][value]
        if not changes:
            return self
        changed = replace(self, **changes)
        for name in ("config", "kind", "_without_memory"):  # found once for all
            if name in self.__dict__:
                changed.__dict__[name] = self.__dict__[name]
        return changed

    def step_with(self, checkpointing: str, offload: str, micro_batch: int) -> SimulatedStep:
        check_choice("checkpointing", checkpointing)
        check_choice("offload", offload)
        if offload == "inputs" and checkpointing == "none":
            raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; use checkpointing='full'")
        if offload != "off" and checkpointing == "reentrant":
            raise ValueError(f"offload={offload!r} acts on checkpoints of torch's newer kind; use checkpointing='full'")
        if offload != "off" and self.gradient_cache:
            raise ValueError(
                f"offload={offload!r} with gradient_cache=True: passes run again in backward, where nothing is "
                "offloaded; use offload='off'"
            )
        passes = accelerate_config.check_step(self.num_gpus, self.engine, self.effective_batch, micro_batch, offload)
        if self.optimizer_in_backward and passes > 1:
            raise ValueError(
                f"micro_batch={micro_batch}: optimizer_in_backward=True updates after each micro-batch; use that of "
                f"effective_batch={self.effective_batch}"
            )
        num_micro_batches = min(2, passes)
        _ = self.name  # imports its class, before processes are forked
        if self.optimizer in WITH_TABLES:
            make_tables()
        layers = under_offloading(self._equal_layers, offload) if self._treats_layers_alike else None
        notes = tuple(self._notes(checkpointing, offload))

        def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
            return SimulatedStep(
                setup=lambda device: ModelUpdate(self, config, checkpointing, offload, micro_batch, num_micro_batches),
                step=lambda update: update.run(),
                num_steps=num_steps(offload, num_micro_batches, self.home),
                num_micro_batches=num_micro_batches,
                repeated=repeated,
                num_gpus=self.num_gpus,
                has_group=self.sharing.has_group,
                assumptions=self.unsaid_sizes,
                notes=notes,
            )

        return told_by_few(step_of, self.config, layers)

    @property
    def sharing(self) -> Sharing:
        shared = super().sharing
        if shared.weights_on != NVME:
            return shared
        return replace(shared, largest_weight=max(weight.numel() for weight in self._without_memory.parameters()))

    @property
    def _treats_layers_alike(self) -> bool:
        """Return whether equal layers repeat each other: their memory is freed in the same order."""
        # DDP cuts buckets across layers; FSDP2 gathers and frees otherwise at the ends, and DeepSpeed looks far ahead.
        differs = self.optimizer_in_backward or self.quantize == "int8" or not self.published.treats_layers_alike
        # Which small weights stay depends on the whole model, and the next layers' are fetched ahead. State of small
        # parameters travels together.
        differs = differs or self.home != RESIDENT or self.optimizer_home != "off"
        return not (differs or self.sharing.has_group)

    @cached_property
    def _equal_layers(self) -> Layers | None:
        # Of a task with images no configuration with fewer layers can be made: it is of several models in one.
        return None if self.kind_of_task.image_options else equal_layers(self._without_memory)

    @cached_property
    def _without_memory(self) -> nn.Module:
        with torch.device("meta"):
            return self.kind_of_task.build(self.config, self.source)

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        """Write an accelerate config, the settings as JSON, and the file of the recipe if it can train with them."""
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        chosen, accumulation = self.with_settings(settings), self.effective_batch // (micro_batch * self.num_gpus)
        fields = asdict(chosen) | {"micro_batch": micro_batch, "gradient_accumulation_steps": accumulation}
        fields |= {"lora_targets": self.lora_targets or self.kind_of_task.lora_targets(self.config)}
        fields |= {"task": self.kind, "checkpointing": checkpointing, "offload": offload, "base": chosen.home}
        fields |= {"sync_each_batch": chosen.sharing.offloads_by_fsdp}
        of_script = self.kind_of_task.write_files(fields, self.config, folder)
        fields |= of_script
        launch, settings_file = folder / "accelerate.yaml", folder / "settings.json"
        settings_file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        accelerate_config.write_accelerate_config(
            launch, chosen.precision, chosen.sharing, accumulation, chosen.max_grad_norm
        )
        if not can_train(chosen):
            return [launch, settings_file, *map(Path, of_script.values())]
        of_recipe = fields_of(chosen, fields)
        (folder / "sft.yaml").write_text(yaml.safe_dump(of_recipe, sort_keys=False), encoding="utf-8")
        return [launch, settings_file, folder / "sft.yaml"]

    def command(self, written: list[Path]) -> str:
        """Return the command of the recipe, or that of a script of one's own which reads TrainingArguments.

        The recipe has small data of its own; its `--dataset` names others.
        """
        config, settings, *others = written
        of_recipe = [path for path in others if path.name == "sft.yaml"]
        launched = f"--config_file {shlex.quote(str(config))}"
        if of_recipe:
            fields = shlex.quote(str(of_recipe[0]))
            return f"accelerate launch {launched} -m hf_memopt.recipes.train_sft --config {fields}"
        chosen = json.loads(settings.read_text(encoding="utf-8"))
        switches = {"offload": chosen["offload"], "base": "off" if chosen["base"] == RESIDENT else chosen["base"]}
        if chosen["optimizer_home"] != "off":
            switches["optimizer_home"] = chosen["optimizer_home"]
        memopt = " ".join(f"--{name} {value}" for name, value in switches.items())
        memopt += " --trained" if chosen["trained"] else ""
        memopt += " --selective_checkpointing" if chosen["checkpointing"] == "selective" else ""
        return f"hf-memopt launch {launched} {memopt} -- {self.kind_of_task.script(chosen, self.config)}"
