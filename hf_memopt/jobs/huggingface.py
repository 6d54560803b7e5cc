"""A transformers model as a workload: built from its configuration alone and trained through Accelerate."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_memopt.estimate.accounting.repeated_layers import Layers
from hf_memopt.estimate.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.jobs import accelerate_config
from hf_memopt.jobs.accelerate_config import DDP
from hf_memopt.jobs.equal_layers import equal_layers, told_by_few, under_offloading
from hf_memopt.jobs.spec import CHOICES
from hf_memopt.jobs.transformers_models.model_options import ModelOptions, check_choice
from hf_memopt.jobs.transformers_models.model_update import ModelUpdate
from hf_memopt.jobs.transformers_models.optimizers import WITH_TABLES
from hf_memopt.jobs.workload import RESIDENT, Lever, divisors, num_steps

# From the fastest to the most frugal: checkpointing and offload.
ACTIVATIONS = {
    "kept": ("none", "off"),
    "offloaded where free": ("none", "auto"),
    "selectively checkpointed": ("selective", "off"),
    "checkpointed": ("full", "off"),
    "checkpointed, inputs offloaded": ("full", "inputs"),
    "all offloaded": ("none", "all"),
}
_LEVERS = (Lever("activations", tuple(ACTIVATIONS)),)
_BASE = Lever("base", CHOICES["base"], of_disk=("file",))
_LEVERS_OF_SHARDS = (Lever("activations", ("kept", "selectively checkpointed", "checkpointed")),)


@dataclass(frozen=True)
class HuggingFaceModel(ModelOptions):
    levers: tuple[Lever, ...] = field(default=_LEVERS, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine != DDP:
            object.__setattr__(self, "levers", _LEVERS_OF_SHARDS)
        elif self.streams and self.base != RESIDENT:
            base = _BASE if self.base is None else Lever("base", (self.base,))
            object.__setattr__(self, "levers", (*self.levers, base))

    @property
    def name(self) -> str:
        images = self.kind_of_task.describe(self.config, self.sample)
        ranks = "" if self.num_gpus == 1 else f", on each of {self.num_gpus} GPUs with {self.engine}"
        return f"{self.model} as {self.kind_of_task.class_name(self.config)}{images and f' {images}'}{ranks}"

    @property
    def micro_batches(self) -> list[int]:
        share = self.effective_batch // self.num_gpus
        return [share] if self.optimizer_in_backward else divisors(share)

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        return self.step_with(*ACTIVATIONS[settings["activations"]], micro_batch, settings.get("base"))

    def step_with(self, checkpointing: str, offload: str, micro_batch: int, base: str | None = None) -> SimulatedStep:
        """Return the step with these settings; `base` is the options' where it is None."""
        base = base or self.base or RESIDENT
        check_choice("checkpointing", checkpointing)
        check_choice("offload", offload)
        if offload == "inputs" and checkpointing == "none":
            raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; use checkpointing='full'")
        passes = accelerate_config.check_step(self.num_gpus, self.engine, self.effective_batch, micro_batch, offload)
        if self.optimizer_in_backward and passes > 1:
            raise ValueError(
                f"micro_batch={micro_batch}: optimizer_in_backward=True updates after each micro-batch; use that of "
                f"effective_batch={self.effective_batch}"
            )
        num_micro_batches = min(2, passes)
        _ = self.name  # imports its class, before processes are forked
        # Which small weights stay depends on the whole model, and the next layers' are fetched ahead.
        differs = self._treats_layers_differently or base != RESIDENT
        layers = None if differs else under_offloading(self._equal_layers, offload)

        def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
            return SimulatedStep(
                setup=lambda device: ModelUpdate(
                    self, config, checkpointing, offload, micro_batch, num_micro_batches, base
                ),
                step=lambda update: update.run(),
                num_steps=num_steps(offload, num_micro_batches, base),
                num_micro_batches=num_micro_batches,
                repeated=repeated,
                num_gpus=self.num_gpus,
            )

        return told_by_few(step_of, self.config, layers)

    @property
    def _treats_layers_differently(self) -> bool:
        """Return whether equal layers do not repeat each other: their memory is freed in another order."""
        # DDP cuts buckets across layers; FSDP2 gathers and frees otherwise at the ends, and DeepSpeed looks far ahead.
        differs = self.optimizer in WITH_TABLES or self.optimizer_in_backward or self.quantize == "int8"
        return differs or self.num_gpus > 1

    @cached_property
    def _equal_layers(self) -> Layers | None:
        if not self.kind_of_task.has_equal_layers:
            return None
        with torch.device("meta"):
            return equal_layers(self.kind_of_task.build(self.config, self.source))

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        """An accelerate config; the settings as JSON; and flags for `train_causal_lm.py` if it can train with them."""
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        accumulation = self.effective_batch // (micro_batch * self.num_gpus)
        chosen = asdict(self) | {"micro_batch": micro_batch, "gradient_accumulation_steps": accumulation}
        chosen |= {"lora_targets": self.lora_targets or self.kind_of_task.lora_targets(self.config)}
        chosen |= {"task": self.kind, "checkpointing": checkpointing, "offload": offload}
        chosen |= {"base": settings.get("base") or self.base or RESIDENT}
        del chosen["levers"]
        launch, settings_file = folder / "accelerate.yaml", folder / "settings.json"
        settings_file.write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
        accelerate_config.write_accelerate_config(
            launch, self.precision, self.num_gpus, self.engine, accumulation, self.max_grad_norm
        )
        written = [launch, settings_file]
        if self._is_for_the_recipe(checkpointing):
            fields = {
                "model": {"model": self.model, "dtype": self.dtype, "gradient_checkpointing": checkpointing == "full"},
                "data": {"block_size": self.seq_len},
                "training": {
                    "per_device_batch_size": micro_batch,
                    "gradient_accumulation_steps": accumulation,
                    "max_grad_norm": self.max_grad_norm,
                },
                "offload": {"offload": offload, "offload_threshold_mb": self.offload_threshold_mb},
            }
            (folder / "causal_lm.yaml").write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
            written.append(folder / "causal_lm.yaml")
        return written

    def command(self, written: list[Path]) -> str:
        config, settings, *fields = written
        script = (
            f"-m hf_memopt.recipes.train_causal_lm --config_path {fields[0]}" if fields else f"a script with {settings}"
        )
        base = json.loads(settings.read_text(encoding="utf-8"))["base"]
        if base != RESIDENT:
            return f"hf-memopt launch --config_file {config} --base {base} -- {script}"
        return f"accelerate launch --config_file {config} {script}"

    def _is_for_the_recipe(self, checkpointing: str) -> bool:
        trains_all = self.kind == "causal" and self.lora_rank is None and self.max_grad_norm is not None
        plain = (self.optimizer, self.optimizer_in_backward, self.attention) == ("adamw", False, "auto")
        plain = plain and (self.loss, self.padding) == ("full", False) and self.dtype != "float16"
        return trains_all and self.engine == DDP and checkpointing != "selective" and plain
