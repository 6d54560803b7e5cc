"""All options for training a transformers model, checked before anything is built."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_memopt.planning.job import CHOICES, DEFAULTS, FIELDS
from hf_memopt.planning.models.accelerate_config import (
    DDP,
    NVME,
    OPTIMIZERS_OF_BITSANDBYTES,
    Sharing,
    check_options,
    check_zero,
    shards_weights,
)
from hf_memopt.planning.models.adapters import import_peft
from hf_memopt.planning.models.denoising import Denoising
from hf_memopt.planning.models.model_batches import Batch, Sample, parse_image_size, with_padding
from hf_memopt.planning.models.model_config import PublishedWeights, published_weights, read_config, unsaid_sizes
from hf_memopt.planning.models.pipelines import EncoderConfig, read_encoders
from hf_memopt.planning.models.tasks import CONTRASTIVE, TASKS, Task, task_of
from hf_memopt.planning.workload import OFF
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.units import GIB, parse_size

_CHOSEN = tuple(name for name in CHOICES if name not in ("base", "optimizer"))
# Options without meaning unless there are adapters, and their defaults.
_OF_ADAPTERS = (
    ("quantize", "none"),
    ("kbit_preparation", "trl"),
    ("lora_targets", None),
    ("use_dora", False),
    ("adapters_dtype", "auto"),
)
OF_BITSANDBYTES = ("nf4", "nf4-double", "nf4-experts", "int8-llm")
_DTYPES = tuple(name for name in CHOICES["dtype"] if name != "auto")
_OF_IMAGES = ("images_per_sample", "image_size", "freeze_vision_tower", "text_tokens", "num_frames", "encoders")
_OF_CONTRASTIVE = ("passages", "gradient_cache")
_OF_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
# The dtype of weights that sharding engines do not cast, by the step's precision; fp16 is simulated as bf16.
_UNCHANGED = {"bf16": "bfloat16", "fp16": ""}


@dataclass(frozen=True)
class ModelOptions:
    """A transformers model, a batch, and an update as Accelerate runs it.

    Weights are neither downloaded nor allocated. Without `padding` the batch has no attention mask, so that attention
    may take the kernel without one; labels are the inputs. fp16 is simulated without its loss scaler.

    Args: those of `Job`, whose help describes them, and `offload_threshold_mb` of `ActivationOffloader`; further:
        seq_len: on both sides of an encoder-decoder; images and Whisper's sound have their configuration's size.
        effective_batch: of all GPUs together.
        text_tokens: CLIP's not counted.
        passages: each text has `seq_len` tokens.
        dtype: "auto" becomes the configuration's; where it has none, bfloat16 for a causal model and a denoiser with
            adapters, float32 for others.
        quantize: "auto" becomes that of a checkpoint published in few bits, or "none".
            "nf4" (QLoRA) multiplies in `dtype`; the experts of a mixture are no linear layers, and are in 4 bits
            with "nf4-experts" alone. "nf4-double" quantises the scales, too. "int8-llm" is LLM.int8, "int8-torchao"
            `Int8WeightOnlyConfig`.
        kbit_preparation: of the weights that bitsandbytes does not quantise, and of the adapters; those of a denoiser
            always as "peft", since diffusers' scripts call it.
        optimizer_on, weights_on: see `Sharing`.
        max_grad_norm: None, gradients are not clipped.
        base: None, as "off", but plans try the others.
        base_budget: None, as little as visits need.
        trained: the optimizer's state has the home of the weights, too, unless `optimizer_home` says another.
    """

    model: str
    read: Any = None
    trainer: str | None = None
    micro_batch: int = 1
    checkpointing: str = DEFAULTS["checkpointing"]
    offload: str = DEFAULTS["offload"]
    seq_len: int = DEFAULTS["seq_len"]
    effective_batch: int = 8
    task: str = DEFAULTS["task"]
    images_per_sample: int = DEFAULTS["images_per_sample"]
    image_size: str | None = None
    text_tokens: int | None = None
    num_frames: int | None = None
    encoders: str = DEFAULTS["encoders"]
    freeze_vision_tower: bool = False
    passages: int = DEFAULTS["passages"]
    gradient_cache: bool = False
    padding: bool = False
    dtype: str = DEFAULTS["dtype"]
    precision: str = DEFAULTS["precision"]
    attention: str = DEFAULTS["attention"]
    loss: str = "full"
    optimizer: str = DEFAULTS["optimizer"]
    optimizer_home: str = DEFAULTS["optimizer_home"]
    optimizer_on: str = DEFAULTS["optimizer_on"]
    weights_on: str = DEFAULTS["weights_on"]
    lora_rank: int | None = None
    lora_targets: str | None = None
    use_dora: bool = False
    adapters_dtype: str = DEFAULTS["adapters_dtype"]
    freeze_layers: int | None = None
    quantize: str = DEFAULTS["quantize"]
    kbit_preparation: str = DEFAULTS["kbit_preparation"]
    base: str | None = None
    base_budget: str | None = None
    trained: bool = False
    max_grad_norm: float | None = DEFAULTS["max_grad_norm"]
    offload_threshold_mb: float = 10.0
    num_gpus: int = DEFAULTS["num_gpus"]
    engine: str = DEFAULTS["engine"]

    def __post_init__(self) -> None:
        for name in _CHOSEN:
            check_choice(name, getattr(self, name))
        for name, each in FIELDS.items():
            if each.allowed is not None and name in vars(self):
                each.allowed.check(name, getattr(self, name))
        NOT_NEGATIVE.check("offload_threshold_mb", self.offload_threshold_mb)
        object.__setattr__(self, "dtype", self._resolved_dtype())
        object.__setattr__(self, "quantize", self._resolved_quantize())
        object.__setattr__(self, "kbit_preparation", self._resolved_preparation())
        check_options(self)
        check_zero(self.engine, self.dtype, self.precision)
        self._check_adapters()
        self._check_base()
        self._check_step()
        self._check_loss()
        self._check_task()
        positions = self.kind_of_task.positions
        longest = getattr(self.config.get_text_config(), positions, None) if positions else None
        if longest is not None and 0 < longest < self.seq_len:  # XLNet's -1 is no limit
            raise ValueError(f"seq_len={self.seq_len} is longer than the model's {positions}={longest}")

    def _resolved_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        said = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        # Language models, and denoisers with adapters, are trained in 16 bits; transformers makes others in float32.
        is_denoiser = self.kind == "denoising" and self.lora_rank is not None
        usual = "bfloat16" if self.kind == "causal" or is_denoiser else "float32"
        return said if said in _DTYPES else self.published.dtype or usual

    def _resolved_quantize(self) -> str:
        published = self.published
        if self.quantize == "auto":
            return published.quantize
        has_experts = self.quantize == "nf4-experts" and published.quantize in ("nf4", "nf4-double")
        if published != PublishedWeights() and self.quantize != published.quantize and not has_experts:
            form = "MXFP4" if published.quantize == "none" else published.quantize
            raise ValueError(
                f"quantize={self.quantize!r}: {self.source} was published in {form}, which transformers keeps as it "
                "loads; leave it out, or name the checkpoint that it was made from"
            )
        return self.quantize

    def _resolved_preparation(self) -> str:
        if self.kind != "denoising":
            return self.kbit_preparation
        return "peft" if self.quantize in OF_BITSANDBYTES else DEFAULTS["kbit_preparation"]

    def _check_task(self) -> None:
        task = self.kind_of_task
        for name, known in task.only.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not simulated for task={self.kind!r}; use {' or '.join(known)}"
                )
        of_others = [name for name in _OF_IMAGES if name not in task.image_options]
        of_others += [] if self.kind == CONTRASTIVE else _OF_CONTRASTIVE
        for name in of_others:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name}={getattr(self, name)!r} means nothing to task={self.kind!r}; leave it out")
        if self.gradient_cache:
            self._check_alone("gradient_cache=True", " is not simulated")
            if self.home != OFF:
                raise ValueError(f"gradient_cache=True with base={self.base!r} is not simulated; use base={OFF!r}")
        if self.padding and self.trainer not in (None, "sft"):
            raise ValueError(f"padding=True with trainer={self.trainer!r} is not simulated; leave it out")
        if self.padding and not task.has_mask:
            raise ValueError(f"padding=True: batches of task={self.kind!r} have no attention mask; leave it out")
        task.describe(self.config, self.sample)
        _ = self.encoder_configs

    def _check_adapters(self) -> None:
        if self.lora_rank is not None:
            import_peft(self.lora_rank)
            if self.freeze_layers is not None:
                raise ValueError(f"freeze_layers={self.freeze_layers}: adapters freeze all layers; leave one out")
            self._check_packed()
            if self.kbit_preparation != "trl" and self.quantize not in OF_BITSANDBYTES:
                raise ValueError(
                    f"kbit_preparation={self.kbit_preparation!r} is for weights that bitsandbytes quantises; give "
                    f"quantize={' or '.join(OF_BITSANDBYTES)}"
                )
            return
        if self.published.quantize != "none":
            raise ValueError(
                f"{self.source} was published in {self.quantize}, which does not train; give lora_rank, such as "
                "lora_rank=16, for adapters on it"
            )
        unused = [f"{name}={getattr(self, name)!r}" for name, default in _OF_ADAPTERS if getattr(self, name) != default]
        if unused:
            raise ValueError(f"{' and '.join(unused)}: for adapters; give lora_rank, such as lora_rank=16")

    @property
    def packed_in(self) -> str:
        """Return the dtype that packs weights in 4 bits: engines that divide weights divide those of a float alone."""
        published = self.published
        if published.quantize == "none" and shards_weights(self.engine):
            return self.dtype
        return published.storage

    def _check_packed(self) -> None:
        if self.quantize == "none" or not shards_weights(self.engine):
            return
        if self.packed_in != self.dtype:
            raise ValueError(
                f"engine={self.engine!r}: {self.source} was published with 4 bits packed in {self.packed_in}, which "
                f"the engine does not divide; name the checkpoint that it was made from, with quantize={self.quantize}"
            )
        if _UNCHANGED.get(self.precision, self.dtype) != self.dtype:
            raise ValueError(
                f"precision={self.precision!r} with dtype={self.dtype!r} and engine={self.engine!r}: 4 bits are packed "
                "in numbers of dtype, to be divided as other weights are, and the engine casts those to the precision, "
                "which destroys the bits; use dtype='bfloat16' with precision='bf16'"
            )

    def _check_base(self) -> None:
        if self.base is not None:
            check_choice("base", self.base)
        if self.base_budget is not None:
            parse_size(self.base_budget, "base_budget")
        if self.trained:
            self._check_trained()
        if self.streams or self.home == OFF:
            return
        self._check_alone(f"base={self.base!r}", " is not simulated: ranks share one copy of the weights")
        raise ValueError(f"base={self.base!r}: weights that train do not stream; give a lora_rank, or trained=True")

    def _check_trained(self) -> None:
        if self.home == OFF:
            raise ValueError("trained=True needs a home for the weights; give base='host' or base='file'")
        reason = ": gradients at their home are not averaged over ranks, and engines place weights themselves"
        self._check_alone("trained=True", reason)
        if self.optimizer in OPTIMIZERS_OF_BITSANDBYTES:
            raise ValueError(f"optimizer={self.optimizer!r} with trained=True is not simulated; use another optimizer")
        if self.gradient_cache:
            raise ValueError("trained=True with gradient_cache=True is not simulated; leave one of them out")

    def _check_alone(self, option: str, reason: str) -> None:
        if self.sharing.has_group:
            raise ValueError(
                f"{option} with num_gpus={self.num_gpus} and engine={self.engine!r}{reason}; use one GPU and "
                f"engine={DDP!r}"
            )

    @property
    def sharing(self) -> Sharing:
        # Only DeepSpeed's disk asks for the largest weight.
        largest = max(each.numel() for each in self.without_memory.parameters()) if self.weights_on == NVME else 0
        return Sharing(self.engine, self.num_gpus, self.optimizer_on, self.weights_on, largest)

    @property
    def streams(self) -> bool:
        is_alone = not self.sharing.has_group and not self.gradient_cache
        has_frozen = self.lora_rank is not None or self.freeze_vision_tower or self.freeze_layers is not None
        return is_alone and (has_frozen or self.trained)

    @property
    def home(self) -> str:
        """Return where weights that stream live between their visits to the device."""
        return self.base or OFF

    @property
    def home_of_state(self) -> str:
        """Return where the optimizer's state lives between updates; "off", on the device."""
        return self.home if self.trained and self.optimizer_home == "off" else self.optimizer_home

    @property
    def base_budget_gib(self) -> float | None:
        return None if self.base_budget is None else parse_size(self.base_budget, "base_budget") / GIB

    def _check_loss(self) -> None:
        if self.loss == "full":
            if self.trainer == "sft":
                raise ValueError("loss='full': TRL's SFTTrainer computes it tile by tile; give trainer='trainer'")
            return
        if self.kind != "causal":
            raise ValueError(f"loss={self.loss!r} is for task='causal', not {self.kind!r}; use 'full'")
        if self.trainer != "sft":
            raise ValueError(f"loss={self.loss!r} is of TRL's SFTTrainer; use 'full', or trainer='sft'")

    def _check_step(self) -> None:
        """Refuse a pass that does not divide the update, and ways to keep activations that do not go together."""
        if self.micro_batch < 1 or self.effective_batch // self.num_gpus % self.micro_batch:
            ranks = f" // num_gpus={self.num_gpus}" if self.num_gpus > 1 else ""
            raise ValueError(
                f"micro_batch={self.micro_batch} must be a divisor of effective_batch={self.effective_batch}{ranks}"
            )
        if self.engine != DDP and self.offload != "off":
            raise ValueError(
                f"offload={self.offload!r} with engine={self.engine!r} is not simulated; use offload='off'"
            )
        if self.offload == "inputs" and self.checkpointing == "none":
            raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; use checkpointing='full'")
        if self.offload != "off" and self.checkpointing == "reentrant":
            raise ValueError(
                f"offload={self.offload!r} acts on checkpoints of torch's newer kind; use checkpointing='full'"
            )
        if self.offload != "off" and self.gradient_cache:
            raise ValueError(
                f"offload={self.offload!r} with gradient_cache=True: passes run again in backward, where nothing is "
                "offloaded; use offload='off'"
            )

    @property
    def sample(self) -> Sample:
        computed_in = _OF_AUTOCAST.get(self.precision, "float32") if self.dtype == "float32" else self.dtype
        size = parse_image_size(self.image_size)
        return Sample(
            *(self.seq_len, self.images_per_sample, size, getattr(torch, computed_in)),
            *(self.text_tokens, self.num_frames, self.encoders, self.passages),
        )

    @cached_property
    def encoder_configs(self) -> tuple[EncoderConfig, ...]:
        return read_encoders(self.model, self.encoders)

    @property
    def usual_adapters_dtype(self) -> torch.dtype | None:
        """Return the dtype of adapters, as TRL or diffusers' scripts have them; None, as PEFT makes them."""
        of_bitsandbytes = self.quantize in OF_BITSANDBYTES
        if self.kind == "denoising":
            return torch.float32 if of_bitsandbytes or self.dtype == "float16" else getattr(torch, self.dtype)
        return torch.bfloat16 if of_bitsandbytes and self.kbit_preparation == "trl" else None

    def batch(self, config: Any, num_samples: int) -> Batch:
        batch = self.kind_of_task.batch(config, num_samples, self.sample)
        return with_padding(batch) if self.padding else batch

    @property
    def source(self) -> str:
        return f"model={self.model!r}"

    @cached_property
    def config(self) -> Any:
        return read_config(self.model) if self.read is None else self.read

    @cached_property
    def without_memory(self) -> nn.Module:
        with torch.device("meta"):
            return self.kind_of_task.build(self.config, self.source)

    @property
    def published(self) -> PublishedWeights:
        return published_weights(self.config, self.source)

    @cached_property
    def unsaid_sizes(self) -> tuple[str, ...]:
        return unsaid_sizes(self.model, self.config)

    @cached_property
    def kind(self) -> str:
        return task_of(self.config, self.task, self.source)

    @property
    def kind_of_task(self) -> Task | Denoising:
        return TASKS[self.kind]


def check_choice(name: str, value: str) -> None:
    if value not in CHOICES[name]:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(CHOICES[name])}")
