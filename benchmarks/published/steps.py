"""The published steps, built from hyperparameters alone."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.published.cards import card_of
from benchmarks.published.measurements import Measurement, model_config
from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.models.equal_layers import equal_layers, told_by_few
from hf_memopt.planning.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.quantised.quantised_base import adapt_as_peft_does, quantise

_AUTO_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
}
_OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
}


class _NoUpdate(torch.optim.SGD):
    """An optimizer for passes that were measured without an update."""

    def step(self, closure: Any = None) -> None:
        return None


def estimate(measured: Measurement) -> MemoryEstimate:
    """Estimate two steps of a measurement, without a GPU."""
    import peft  # noqa: F401 - once, before processes are forked

    return run_isolated(lambda: simulate_step(simulated(measured), gpu=card_of(measured.gpu)))


def simulated(measured: Measurement) -> SimulatedStep:
    """Return the step; for a model with equal layers, with the shorter steps that determine it."""

    def step_of(config: Any, repeated: RepeatedLayers | None) -> SimulatedStep:
        return SimulatedStep(
            lambda device: PublishedStep(measured, config, device), PublishedStep.run, repeated=repeated
        )

    hyperparameters = dict(model_config(measured.model))
    config = transformers.AutoConfig.for_model(hyperparameters.pop("model_type"), **hyperparameters)
    with torch.device("meta"):
        layers = equal_layers(_AUTO_CLASSES[measured.task].from_config(config))
    return told_by_few(step_of, config, layers)


class PublishedStep:
    def __init__(self, measured: Measurement, config: Any, device: torch.device) -> None:
        self._measured = measured
        torch.backends.cuda.matmul.allow_tf32 = measured.tf32
        if measured.expands_grouped_heads:
            F.scaled_dot_product_attention = _expanding(F.scaled_dot_product_attention)
        self._model = _build(measured, config, device)
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = _OPTIMIZERS.get(measured.optimizer, _NoUpdate)(trainable)
        with device:
            self._batch = _batch(measured)

    def run(self) -> None:
        """Train one update. The output lives to its end, like a script's variable; as logits, until the next one."""
        if self._measured.zeroes_first:
            self._optimizer.zero_grad()
        for _ in range(self._measured.accumulation):
            output = self._forward()
            loss = output.loss if self._measured.loss == "labels" else output.logits.sum()
            loss.backward()
            del loss
        if self._measured.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._measured.max_grad_norm)
        self._optimizer.step()
        if not self._measured.zeroes_first:
            self._optimizer.zero_grad()
        if self._measured.loss == "logits":
            self._output = output

    def _forward(self) -> Any:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._measured.precision)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return self._model(**self._batch)


def _build(measured: Measurement, config: Any, device: torch.device) -> nn.Module:
    model: Any = _AUTO_CLASSES[measured.task].from_config(
        config, dtype=getattr(torch, measured.dtype), attn_implementation=measured.attention
    )
    if measured.base == "nf4":
        quantise(model, "nf4", getattr(torch, measured.dtype), is_prepared=measured.is_prepared)
    model.to(device)
    model.config.use_cache = False
    if measured.lora_rank is not None:
        model = _with_adapters(model, measured)
    if measured.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if measured.lora_rank is not None:
            model.enable_input_require_grads()
    model.train()
    return model


def _with_adapters(model: Any, measured: Measurement) -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=measured.lora_rank,
        lora_alpha=measured.lora_rank * measured.lora_alpha_per_rank,
        target_modules=measured.lora_targets,
    )
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, measured.adapters_dtype))
    adapt_as_peft_does(model)
    return model


def _batch(measured: Measurement) -> dict[str, Tensor]:
    config = model_config(measured.model)
    labels = torch.zeros(measured.batch_size, dtype=torch.long)
    if measured.task == "image-classification":
        size, channels = config["image_size"], config.get("num_channels", 3)
        return {"pixel_values": torch.zeros(measured.batch_size, channels, size, size), "labels": labels}
    tokens = torch.zeros(measured.batch_size, measured.seq_len, dtype=torch.long)
    if measured.loss == "logits":
        return {"input_ids": tokens}
    if measured.task == "question-answering":
        return {"input_ids": tokens, "start_positions": labels, "end_positions": labels}
    return {"input_ids": tokens, "labels": tokens if measured.task in ("causal", "masked") else labels}


def _expanding(attention: Any) -> Any:
    """Return attention that repeats the heads of keys and values first, for kernels without groups."""

    def expanded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if groups := query.shape[1] // key.shape[1] - 1:
            key, value = (each.repeat_interleave(groups + 1, dim=1) for each in (key, value))
            options["enable_gqa"] = False
        return attention(query, key, value, *args, **options)

    return expanded
