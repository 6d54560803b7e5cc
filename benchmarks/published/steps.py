"""The steps that others have measured, built from hyperparameters alone."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.published.measurements import Measurement, model_config
from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.estimate.gpus import CARDS
from hf_memopt.estimate.simulation.quantised.quantised_base import adapt_as_peft_does, quantise

_AUTO_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
}
_OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
}


def estimate(measured: Measurement) -> MemoryEstimate:
    """Estimate two steps of what was measured; no card is needed.

    Raises:
        ValueError: the step cannot be simulated.
    """
    card = CARDS.get(measured.gpu)
    import peft  # noqa: F401 - once, before processes are forked

    return estimate_peak_memory(lambda device: PublishedStep(measured, device), PublishedStep.run, gpu=card)


class PublishedStep:
    """Model, optimizer and batch on a device."""

    def __init__(self, measured: Measurement, device: torch.device) -> None:
        self._measured = measured
        if measured.expands_grouped_heads:
            F.scaled_dot_product_attention = _expanding(F.scaled_dot_product_attention)
        self._model = _build(measured, device)
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = _OPTIMIZERS[measured.optimizer](trainable)
        with device:
            self._batch = _batch(measured)

    def run(self) -> None:
        """Train one update; the model's output lives until its end, as in a script's variable."""
        if self._measured.zeroes_first:
            self._optimizer.zero_grad()
        for _ in range(self._measured.accumulation):
            output = self._forward()
            output.loss.backward()
        if self._measured.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._measured.max_grad_norm)
        self._optimizer.step()
        if not self._measured.zeroes_first:
            self._optimizer.zero_grad()
        del output

    def _forward(self) -> Any:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._measured.precision)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return self._model(**self._batch)


def _build(measured: Measurement, device: torch.device) -> nn.Module:
    hyperparameters = dict(model_config(measured.model))
    config = transformers.AutoConfig.for_model(hyperparameters.pop("model_type"), **hyperparameters)
    model: Any = _AUTO_CLASSES[measured.task].from_config(
        config, dtype=getattr(torch, measured.dtype), attn_implementation=measured.attention
    )
    if measured.base == "nf4":
        quantise(model, "nf4", getattr(torch, measured.dtype))
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
    model = get_peft_model(model, adapters, autocast_adapter_dtype=measured.adapters_dtype == "float32")
    adapt_as_peft_does(model)
    return model


def _batch(measured: Measurement) -> dict[str, Tensor]:
    config = model_config(measured.model)
    labels = torch.zeros(measured.batch_size, dtype=torch.long)
    if measured.task == "image-classification":
        size, channels = config["image_size"], config.get("num_channels", 3)
        return {"pixel_values": torch.zeros(measured.batch_size, channels, size, size), "labels": labels}
    tokens = torch.zeros(measured.batch_size, measured.seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens if measured.task == "causal" else labels}


def _expanding(attention: Any) -> Any:
    """Attention that repeats the heads of keys and values first, so that kernels without groups take them."""

    def expanded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if groups := query.shape[1] // key.shape[1] - 1:
            key, value = (each.repeat_interleave(groups + 1, dim=1) for each in (key, value))
            options["enable_gqa"] = False
        return attention(query, key, value, *args, **options)

    return expanded
