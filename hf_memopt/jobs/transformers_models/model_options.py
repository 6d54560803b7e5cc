"""All options for training a transformers model, checked before anything is built."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_memopt.estimate.gpus import parse_size
from hf_memopt.jobs.accelerate_config import DDP, check_ranks, check_zero
from hf_memopt.jobs.diffusers_models.denoising import Denoising
from hf_memopt.jobs.spec import CHOICES, DEFAULTS
from hf_memopt.jobs.transformers_models.adapters import import_fused_head, import_peft
from hf_memopt.jobs.transformers_models.model_batches import Batch, Sample, with_padding
from hf_memopt.jobs.transformers_models.model_config import read_config
from hf_memopt.jobs.transformers_models.tasks import TASKS, Task, task_of
from hf_memopt.jobs.workload import RESIDENT
from hf_memopt.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from hf_memopt.units import GIB

_CHOSEN = ("task", "dtype", "quantize", "precision", "attention", "loss", "optimizer", "engine")
# Options without meaning unless there are adapters, and their defaults.
_OF_ADAPTERS = (("quantize", "none"), ("lora_targets", None), ("use_dora", False))
_OF_IMAGES = (("images_per_sample", 1), ("image_size", None), ("freeze_vision_tower", False))
_OF_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
_IMAGE_SIZE = re.compile(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?")


@dataclass(frozen=True)
class ModelOptions:
    """A transformers model, a batch, and an update as Accelerate runs it; see also the help of `JobSpec`.

    Weights are neither downloaded nor allocated. Without `padding` the batch has no attention mask, so that attention
    may take the kernel without one; labels are the inputs. fp16 is simulated without its loss scaler.

    Args:
        model: hub id, folder, or a config.json.
        seq_len: on both sides of an encoder-decoder; images and Whisper's sound have their configuration's size.
        effective_batch: samples per update, of all GPUs together.
        task: one of `TASKS`, or "auto".
        images_per_sample: beside text.
        image_size: such as "448" or "896x672" (height and width).
        freeze_vision_tower: it has no adapters, either.
        padding: some samples are shorter than `seq_len`.
        dtype: of the weights.
        quantize: "nf4" (QLoRA) multiplies in `dtype`. With "int8" (LLM.int8) everything else is in float32, as PEFT
            prepares such models; with "int8-torchao" (`Int8WeightOnlyConfig`) it is as `dtype` says.
        precision: of autocast.
        attention: "auto", "sdpa" or "eager".
        loss: "chunked" makes logits tile by tile and keeps none.
        optimizer: one of `OPTIMIZERS`.
        optimizer_in_backward: each gradient is dropped after its update.
        lora_rank: None, train all weights.
        lora_targets: None, all linear layers but the output's, and of a denoiser those that diffusers' scripts adapt.
        use_dora: as in PEFT.
        max_grad_norm: None, gradients are not clipped.
        base: "host" or "file", frozen weights stream from there (`StreamedWeights`); None, as "resident", but plans try
            the others.
        base_budget: device memory for frozen weights that stream, such as "3GiB"; None, as little as visits need.
        offload_threshold_mb: of `ActivationOffloader`.
        num_gpus: processes that train it together.
        engine: "fsdp2-no-reshard" keeps gathered weights for backward.

    Raises:
        ValueError: an option is unknown or out of range, or two do not go together; or the configuration cannot be
            simulated.
    """

    model: str
    seq_len: int = DEFAULTS["seq_len"]
    effective_batch: int = 8
    task: str = DEFAULTS["task"]
    images_per_sample: int = DEFAULTS["images_per_sample"]
    image_size: str | None = None
    freeze_vision_tower: bool = False
    padding: bool = False
    dtype: str = DEFAULTS["dtype"]
    precision: str = DEFAULTS["precision"]
    attention: str = DEFAULTS["attention"]
    loss: str = DEFAULTS["loss"]
    optimizer: str = DEFAULTS["optimizer"]
    optimizer_in_backward: bool = False
    lora_rank: int | None = None
    lora_targets: str | None = None
    use_dora: bool = False
    quantize: str = DEFAULTS["quantize"]
    base: str | None = None
    base_budget: str | None = None
    max_grad_norm: float | None = DEFAULTS["max_grad_norm"]
    offload_threshold_mb: float = 10.0
    num_gpus: int = DEFAULTS["num_gpus"]
    engine: str = DEFAULTS["engine"]

    def __post_init__(self) -> None:
        for name in _CHOSEN:
            check_choice(name, getattr(self, name))
        for name in ("seq_len", "images_per_sample", "effective_batch", "lora_rank", "num_gpus"):
            COUNT.check(name, getattr(self, name))
        POSITIVE.check("max_grad_norm", self.max_grad_norm)
        NOT_NEGATIVE.check("offload_threshold_mb", self.offload_threshold_mb)
        check_ranks(self.num_gpus, self.engine, self.effective_batch, self.optimizer, self.quantize)
        check_zero(self.engine, self.dtype, self.precision)
        self._check_adapters()
        self._check_base()
        self._check_update()
        self._check_loss()
        self._check_task()
        positions = self.kind_of_task.positions
        longest = getattr(self.config.get_text_config(), positions, None) if positions else None
        if longest is not None and self.seq_len > longest:
            raise ValueError(f"seq_len={self.seq_len} is longer than the model's {positions}={longest}")

    def _check_task(self) -> None:
        task = self.kind_of_task
        for name, known in task.only.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not simulated for task={self.kind!r}; use {' or '.join(known)}"
                )
        for name, default in _OF_IMAGES:
            if name not in task.image_options and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} means nothing to task={self.kind!r}; leave it out")
        if self.padding and not task.has_mask:
            raise ValueError(f"padding=True: batches of task={self.kind!r} have no attention mask; leave it out")
        task.describe(self.config, self.sample)

    def _check_adapters(self) -> None:
        if self.lora_rank is not None:
            import_peft(self.lora_rank)
            return
        unused = [f"{name}={getattr(self, name)!r}" for name, default in _OF_ADAPTERS if getattr(self, name) != default]
        if unused:
            raise ValueError(f"{' and '.join(unused)}: for adapters; give a lora_rank")

    def _check_base(self) -> None:
        if self.base is not None:
            check_choice("base", self.base)
        if self.base_budget is not None:
            parse_size(self.base_budget, "base_budget")
        if self.streams or self.base in (None, RESIDENT):
            return
        if self.num_gpus > 1:
            raise ValueError(
                f"base={self.base!r} with num_gpus={self.num_gpus} is not simulated: ranks share one copy of the "
                "weights; use one GPU"
            )
        raise ValueError(f"base={self.base!r}: weights that train do not stream; give a lora_rank")

    @property
    def streams(self) -> bool:
        """Return whether there are frozen weights that may stream."""
        return self.num_gpus == 1 and (self.lora_rank is not None or self.freeze_vision_tower)

    @property
    def base_budget_gib(self) -> float | None:
        return None if self.base_budget is None else parse_size(self.base_budget, "base_budget") / GIB

    def _check_loss(self) -> None:
        if self.loss == "full":
            return
        if self.kind != "causal":
            raise ValueError(f"loss={self.loss!r} is for task='causal', not {self.kind!r}; use 'full'")
        if self.engine != DDP:
            raise ValueError(f"loss={self.loss!r} with engine={self.engine!r} is not simulated; use 'full'")
        import_fused_head()

    def _check_update(self) -> None:
        if not self.optimizer_in_backward:
            return
        if self.max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm}: with optimizer_in_backward gradients are gone before their norm "
                "is known; use none"
            )
        if self.num_gpus > 1:
            raise ValueError(
                f"num_gpus={self.num_gpus}: with optimizer_in_backward weights are updated before the ranks' gradients "
                "are averaged; leave one of them out"
            )
        if self.precision == "fp16":
            raise ValueError(
                "precision='fp16': its loss scaler has to see all gradients before an update; with "
                "optimizer_in_backward use bf16"
            )

    @property
    def sample(self) -> Sample:
        computed_in = _OF_AUTOCAST.get(self.precision, "float32") if self.dtype == "float32" else self.dtype
        size = _parsed_size(self.image_size)
        return Sample(self.seq_len, self.images_per_sample, size, getattr(torch, computed_in))

    def batch(self, config: Any, num_samples: int) -> Batch:
        batch = self.kind_of_task.batch(config, num_samples, self.sample)
        return with_padding(batch) if self.padding else batch

    @property
    def source(self) -> str:
        return f"model={self.model!r}"

    @cached_property
    def config(self) -> Any:
        return read_config(self.model)

    @cached_property
    def kind(self) -> str:
        return task_of(self.config, self.task, self.source)

    @property
    def kind_of_task(self) -> Task | Denoising:
        return TASKS[self.kind]


def check_choice(name: str, value: str) -> None:
    if value not in CHOICES[name]:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(CHOICES[name])}")


def _parsed_size(text: str | None) -> tuple[int, int] | None:
    """Height and width."""
    if text is None:
        return None
    found = _IMAGE_SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"image_size={text!r} must be pixels, such as 448, or height and width, such as 896x672")
    return int(found[1]), int(found[2] or found[1])
