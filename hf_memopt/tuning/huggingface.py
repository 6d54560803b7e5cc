"""A transformers model as a workload: built from its configuration alone and trained through Accelerate."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.estimate.accounting.repeated_layers import Layers
from hf_memopt.estimate.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.estimate.simulation.quantised_base import quantise_nf4
from hf_memopt.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from hf_memopt.training.low_bit import low_bit_adamw
from hf_memopt.tuning.accelerate_config import write_accelerate_config
from hf_memopt.tuning.adapters import ALL_LINEAR, import_peft, with_adapters
from hf_memopt.tuning.equal_layers import equal_layers, with_num_layers
from hf_memopt.tuning.model_config import batch_for, building, read_config
from hf_memopt.tuning.workload import SearchDimension, divisors, num_steps_of_auto

# From the most specific on: encoder-decoders and encoders are in the causal list too, for their decoder mode.
_AUTO_CLASSES = {
    "seq2seq": AutoModelForSeq2SeqLM,
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "image-classification": AutoModelForImageClassification,
}
CHECKPOINTING = ("none", "selective", "full")
OFFLOAD = ("off", "auto", "inputs", "all")

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw-8bit": lambda parameters: low_bit_adamw(8)(parameters),
    "adamw-4bit": lambda parameters: low_bit_adamw(4)(parameters),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
# What each option may be, the default first.
CHOICES = {
    "task": ("auto", *_AUTO_CLASSES),
    "dtype": ("float32", "bfloat16", "float16"),
    "quantize": ("none", "nf4"),
    "precision": ("no", "bf16", "fp16"),
    "attention": ("auto", "sdpa", "eager"),
    "optimizer": tuple(_OPTIMIZERS),
}

# What becomes of the activations, from the fastest to the most frugal: checkpointing and offload.
ACTIVATIONS = {
    "kept": ("none", "off"),
    "offloaded where free": ("none", "auto"),
    "selectively checkpointed": ("selective", "off"),
    "checkpointed": ("full", "off"),
    "checkpointed, inputs offloaded": ("full", "inputs"),
    "all offloaded": ("none", "all"),
}
_LEVERS = (SearchDimension("activations", tuple(ACTIVATIONS)),)


@dataclass(frozen=True)
class HuggingFaceModel:
    """A transformers model, a batch without padding, and an update as Accelerate runs it.

    Weights are neither downloaded nor allocated. The batch has no attention mask, so that attention may take the kernel
    without one; labels are the inputs. fp16 is simulated without its loss scaler.

    Args:
        model: hub id, folder, or a config.json.
        seq_len: tokens per sample, on both sides of an encoder-decoder; images have their configuration's size.
        effective_batch: samples per update.
        task: "causal", "masked", "seq2seq" or "image-classification"; "auto", that of the class which the
            configuration names.
        dtype: of the weights: "float32", "bfloat16" or "float16".
        quantize: how frozen weights of linear layers are stored: "none", as `dtype` says; "nf4", in 4 bits by
            bitsandbytes (QLoRA), multiplied in `dtype` and everything else in float32, as PEFT prepares such models.
        precision: of Accelerate's autocast: "no", "bf16" or "fp16".
        attention: "sdpa" or "eager"; "auto", transformers' choice for the architecture.
        optimizer: "adamw" (torch's fused one), "adamw-foreach" (torch's default), "adamw-8bit" and "adamw-4bit"
            (torchao's), "sgd" (no momentum) or "adafactor".
        lora_rank: train adapters of this rank (PEFT) and freeze the rest; None, train all weights.
        lora_targets: which layers have adapters, such as "q_proj,v_proj"; "all-linear", all but the output's.
        max_grad_norm: gradients are clipped to this norm; None, they are not.
        offload_threshold_mb: of `ActivationOffloader`.

    Raises:
        ValueError: an option is unknown or out of range; the configuration cannot be found, read or simulated (see
            `read_config`); its architecture belongs to none of the tasks; or `seq_len` is longer than the model's
            positions.
    """

    model: str
    seq_len: int = 2048
    effective_batch: int = 8
    task: str = "auto"
    dtype: str = "float32"
    precision: str = "no"
    attention: str = "auto"
    optimizer: str = "adamw"
    lora_rank: int | None = None
    lora_targets: str = ALL_LINEAR
    quantize: str = "none"
    max_grad_norm: float | None = 1.0
    offload_threshold_mb: float = 10.0
    levers: tuple[SearchDimension, ...] = field(default=_LEVERS, init=False)

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            _check_choice(name, getattr(self, name), known)
        for name in ("seq_len", "effective_batch", "lora_rank"):
            COUNT.check(name, getattr(self, name))
        POSITIVE.check("max_grad_norm", self.max_grad_norm)
        NOT_NEGATIVE.check("offload_threshold_mb", self.offload_threshold_mb)
        if self.lora_rank is not None:
            import_peft(self.lora_rank)
        elif (self.quantize, self.lora_targets) != ("none", ALL_LINEAR):
            raise ValueError(
                f"quantize={self.quantize!r} and lora_targets={self.lora_targets!r} are for adapters; give a lora_rank"
            )
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is not None and self.seq_len > longest and self.kind != "image-classification":
            raise ValueError(f"seq_len={self.seq_len} is longer than the model's max_position_embeddings={longest}")

    @property
    def name(self) -> str:
        """The model, and the class of transformers that is simulated."""
        return f"{self.model} as {self._class_name(self.kind)}"

    @property
    def micro_batches(self) -> list[int]:
        return divisors(self.effective_batch)

    @cached_property
    def config(self) -> Any:
        """The configuration, which says everything about shapes."""
        return read_config(self.model)

    @cached_property
    def kind(self) -> str:
        """The task that is simulated.

        Raises:
            ValueError: transformers has no class of this architecture for it; or the task is "auto", and the
                configuration names a class of another task.
        """
        possible = {
            task: self._class_name(task)
            for task, auto in _AUTO_CLASSES.items()
            if type(self.config) in auto._model_mapping
        }
        if self.task != "auto" and self.task in possible:
            return self.task
        if not possible or self.task != "auto":
            wanted = "any task of " + ", ".join(_AUTO_CLASSES) if self.task == "auto" else f"task={self.task!r}"
            raise ValueError(
                f"model={self.model!r}: transformers has no class of model_type={self.config.model_type!r} for {wanted}"
                "; write setup and step yourself and call hf_memopt.estimate.estimate.estimate_peak_memory"
            )
        named = self.config.architectures or list(possible.values())
        for task, class_name in possible.items():
            if class_name in named:
                return task
        known = ", ".join(f"task={task!r} for {class_name}" for task, class_name in possible.items())
        raise ValueError(
            f"model={self.model!r}: its configuration is of {named[0]}, whose task is not simulated; name another one "
            f"if that is meant: {known}"
        )

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        return self.step_with(*ACTIVATIONS[settings["activations"]], micro_batch)

    def step_with(self, checkpointing: str, offload: str, micro_batch: int) -> SimulatedStep:
        """The step with these ways to handle activations.

        Args:
            checkpointing: "none", "selective" (`apply_selective_checkpointing`) or "full" (transformers' own).
            offload: "off" or a mode of `ActivationOffloader`, which needs `card` in `estimate_peak_memory`.
            micro_batch: samples per forward pass, a divisor of `effective_batch`.

        Raises:
            ValueError: an option is unknown, or they do not go together.
        """
        _check_choice("checkpointing", checkpointing, CHECKPOINTING)
        _check_choice("offload", offload, OFFLOAD)
        if offload == "inputs" and checkpointing == "none":
            raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; use checkpointing='full'")
        if micro_batch < 1 or self.effective_batch % micro_batch:
            raise ValueError(f"micro_batch={micro_batch} must be a divisor of effective_batch={self.effective_batch}")
        num_micro_batches = min(2, self.effective_batch // micro_batch)
        _ = self.kind, self._class_name(self.kind)  # imported once, before processes are forked
        # A plan treats each layer as it likes, and the windows of mode "all" hold many. And torchao's optimizers keep
        # tables for the process, so that a second simulation is not like the first.
        has_tables = self.optimizer in ("adamw-8bit", "adamw-4bit")
        layers = None if offload in ("auto", "all") or has_tables else self._equal_layers
        if layers is not None and offload == "inputs":
            # A layer's input, made by the one before, leaves when the second after it begins.
            layers = replace(layers, reach=3) if layers.period == 1 else None

        def step_of(config: Any, repeated: RepeatedLayers | None = None) -> SimulatedStep:
            return SimulatedStep(
                setup=lambda device: _Update(self, config, checkpointing, offload, micro_batch, num_micro_batches),
                step=lambda update: update.run(),
                num_steps=num_steps_of_auto(num_micro_batches) if offload == "auto" else 2,
                num_micro_batches=num_micro_batches,
                repeated=repeated,
            )

        if layers is None:
            return step_of(self.config)
        few = RepeatedLayers(layers, lambda count: step_of(with_num_layers(self.config, layers, count)))
        return step_of(self.config, few)

    @cached_property
    def _equal_layers(self) -> Layers | None:
        with building(f"model={self.model!r}"), torch.device("meta"):
            model: Any = _AUTO_CLASSES[self.kind].from_config(self.config, trust_remote_code=False)
        return equal_layers(model)

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        """An accelerate config; the settings as JSON; and flags for `train_causal_lm.py` if it can train with them."""
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        accumulation = self.effective_batch // micro_batch
        chosen = asdict(self) | {"micro_batch": micro_batch, "gradient_accumulation_steps": accumulation}
        chosen |= {"task": self.kind, "checkpointing": checkpointing, "offload": offload}
        del chosen["levers"]
        (folder / "settings.json").write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
        written = [write_accelerate_config(folder / "accelerate.yaml", self.precision), folder / "settings.json"]
        if self._is_for_the_recipe(checkpointing):
            fields = {
                "model": {
                    "model": self.model,
                    "dtype": self.dtype,
                    "gradient_checkpointing": checkpointing == "full",
                },
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
        """The recipe's, if it can train with these settings."""
        config, settings, *fields = written
        script = (
            f"-m hf_memopt.recipes.train_causal_lm --config_path {fields[0]}" if fields else f"a script with {settings}"
        )
        return f"accelerate launch --config_file {config} {script}"

    def _is_for_the_recipe(self, checkpointing: str) -> bool:
        """It has AdamW, clips, and checkpoints whole blocks; attention is transformers' choice."""
        trains_all = self.kind == "causal" and self.lora_rank is None and self.max_grad_norm is not None
        plain = (self.optimizer, self.attention) == ("adamw", "auto") and self.dtype != "float16"
        return trains_all and checkpointing != "selective" and plain

    def _class_name(self, task: str) -> str:
        model_class = _AUTO_CLASSES[task]._model_mapping[type(self.config)]
        return str((model_class[0] if isinstance(model_class, tuple) else model_class).__name__)


class _Update:
    """One update with Accelerate, on the device that its `Accelerator` finds."""

    def __init__(
        self,
        options: HuggingFaceModel,
        config: Any,
        checkpointing: str,
        offload: str,
        micro_batch: int,
        num_micro_batches: int,
    ) -> None:
        windows = GradientAccumulationPlugin(num_steps=num_micro_batches, sync_with_dataloader=False)
        precision = "bf16" if options.precision == "fp16" else options.precision
        self._accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_plugin=windows)
        with self._accelerator.device:
            model = _build(options, config, checkpointing)
            self._batch = batch_for(config, options.kind, micro_batch, options.seq_len)
        optimizer = _OPTIMIZERS[options.optimizer]([p for p in model.parameters() if p.requires_grad])
        # Autocast is to fp16's dtype, but without the scaler, which would need numbers.
        self._accelerator.state._mixed_precision = options.precision
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._accelerator.state._mixed_precision = precision
        self._max_grad_norm = options.max_grad_norm
        self._num_micro_batches = num_micro_batches
        self._offloader = None
        if offload != "off":
            self._offloader = ActivationOffloader(mode=offload, offload_threshold_mb=options.offload_threshold_mb)

    def run(self) -> None:
        for _ in range(self._num_micro_batches):
            with self._accelerator.accumulate(self._model):
                self._accelerator.backward(self._loss())
                if self._accelerator.sync_gradients and self._max_grad_norm is not None:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad()

    def _loss(self) -> Tensor:
        saving = self._offloader.offload_context(self._model) if self._offloader else nullcontext()
        with saving:
            loss: Tensor = self._model(**self._batch).loss
        return loss


def _build(options: HuggingFaceModel, config: Any, checkpointing: str) -> nn.Module:
    auto, dtype = _AUTO_CLASSES[options.kind], getattr(torch, options.dtype)
    attention = None if options.attention == "auto" else options.attention
    # Weights that are quantised reach the device in their final form alone.
    place = torch.device("cpu") if options.quantize != "none" else nullcontext()
    with building(f"model={options.model!r}"), place:
        model: Any = auto.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    model.config.use_cache = False
    model.train()
    if options.quantize == "nf4":
        quantise_nf4(model, dtype)
    if options.lora_rank is not None:
        model = with_adapters(model, options.lora_rank, options.lora_targets)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if checkpointing == "selective":
        apply_selective_checkpointing(model)
    return model  # type: ignore[no-any-return]


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(known)}")
