"""What a transformers model is trained with: all options, checked before anything is built."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_memopt.estimate.simulation.quantised.quantised_base import LAYERS
from hf_memopt.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from hf_memopt.tuning.transformers_models.adapters import ALL_LINEAR, import_peft
from hf_memopt.tuning.transformers_models.model_config import read_config
from hf_memopt.tuning.transformers_models.optimizers import OPTIMIZERS
from hf_memopt.tuning.transformers_models.tasks import TASKS, Task, task_of

# What each option may be, the default first.
CHOICES = {
    "task": ("auto", *TASKS),
    "dtype": ("float32", "bfloat16", "float16"),
    "quantize": ("none", *LAYERS),
    "precision": ("no", "bf16", "fp16"),
    "attention": ("auto", "sdpa", "eager"),
    "optimizer": tuple(OPTIMIZERS),
}


# Options that mean something only beside adapters, and their defaults.
_OF_ADAPTERS = (("quantize", "none"), ("lora_targets", ALL_LINEAR), ("use_dora", False))


@dataclass(frozen=True)
class ModelOptions:
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
            bitsandbytes (QLoRA), multiplied in `dtype`; "int8", in 8 bits by bitsandbytes (LLM.int8); everything else
            is in float32 then, as PEFT prepares such models; "int8-torchao", in 8 bits by torchao
            (`Int8WeightOnlyConfig`), everything else as `dtype` says.
        precision: of Accelerate's autocast: "no", "bf16" or "fp16".
        attention: "sdpa" or "eager"; "auto", transformers' choice for the architecture.
        optimizer: "adamw" (torch's fused one), "adamw-foreach" (torch's default), "adamw-8bit" and "adamw-4bit"
            (torchao's), "sgd" (no momentum) or "adafactor".
        lora_rank: train adapters of this rank (PEFT) and freeze the rest; None, train all weights.
        lora_targets: which layers have adapters, such as "q_proj,v_proj"; "all-linear", all but the output's.
        use_dora: adapters have a magnitude for each of a layer's outputs (PEFT's `use_dora`).
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
    use_dora: bool = False
    quantize: str = "none"
    max_grad_norm: float | None = 1.0
    offload_threshold_mb: float = 10.0

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name in ("seq_len", "effective_batch", "lora_rank"):
            COUNT.check(name, getattr(self, name))
        POSITIVE.check("max_grad_norm", self.max_grad_norm)
        NOT_NEGATIVE.check("offload_threshold_mb", self.offload_threshold_mb)
        self._check_adapters()
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is not None and self.seq_len > longest and TASKS[self.kind].has_tokens:
            raise ValueError(f"seq_len={self.seq_len} is longer than the model's max_position_embeddings={longest}")

    def _check_adapters(self) -> None:
        if self.lora_rank is not None:
            import_peft(self.lora_rank)
            return
        unused = [f"{name}={getattr(self, name)!r}" for name, default in _OF_ADAPTERS if getattr(self, name) != default]
        if unused:
            raise ValueError(f"{' and '.join(unused)}: for adapters; give a lora_rank")

    @property
    def source(self) -> str:
        """The model, as messages name it."""
        return f"model={self.model!r}"

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
        return task_of(self.config, self.task, self.source)

    @property
    def kind_of_task(self) -> Task:
        """What is built and fed for the task."""
        return TASKS[self.kind]


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that an option does not take.

    Raises:
        ValueError: names option, value and those that are known.
    """
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(known)}")
