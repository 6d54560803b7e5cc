"""The model of `train_causal_lm.py`, and one update, as its loop and its plans run it."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_memopt.planning.models.hub_code import check_code, check_model
from hf_memopt.planning.models.model_config import check_sizes
from hf_memopt.planning.models.quiet import building
from hf_memopt.planning.models.tasks import checkpoint_layers
from hf_memopt.recipes.causal_lm.options import ModelOptions, Options
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common.flags import explained
from hf_memopt.training.low_bit import low_bit_adamw
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights


def make_model(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """Return a pretrained model, or one from scratch whose weights torch's seed decides."""
    dtype = getattr(torch, options.dtype)
    if options.model is None:
        config = _new_config(options, tokenizer)
        with building(f"config_overrides={options.config_overrides!r}"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        with explained(f"model={options.model!r} cannot be loaded; pass a hub id or folder of a causal LM"):
            check_model(options.model)
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, trust_remote_code=False)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise ValueError(f"block_size={block_size} is longer than the model's max_position_embeddings={longest}")
    model.config.use_cache = False
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    return model


def _new_config(options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> Any:
    overrides = _overrides(options.config_overrides)
    if options.model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type={options.model_type!r} is unknown to transformers; use qwen3, for example")
    known = AutoConfig.for_model(options.model_type)
    for name in overrides:
        if not hasattr(known, name):
            raise ValueError(
                f"config_overrides={options.config_overrides!r}: {options.model_type} has no setting {name!r}; see "
                f"transformers' {type(known).__name__}"
            )
    token = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": token, "eos_token_id": token, "pad_token_id": token}
    source = f"config_overrides={options.config_overrides!r}"
    with building(source):
        config = AutoConfig.for_model(options.model_type, **{**tokens, **overrides})
    check_code(config, source)
    check_sizes(vars(config), source)
    return config


def _overrides(text: str) -> dict[str, Any]:
    """Read `a=1,b=true,c=silu`, with values as in JSON, and words as strings."""
    overrides = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"config_overrides={text!r}: {setting!r} is not of the form name=value")
        try:
            overrides[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name.strip()] = value
    return overrides


Batch = dict[str, Tensor]


@dataclass(kw_only=True)
class Run(loop.Run):
    held_out: Any = None  # batches to evaluate on
    weights: StreamedWeights | None = None

    def visiting(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose weights may visit the device."""
        return nullcontext() if self.weights is None else self.weights.stream()


def stream_weights(model: nn.Module, options: Options, device: torch.device) -> StreamedWeights | None:
    """Give weights, and later their gradients, the home that the flags name."""
    training = options.training
    if training.base == "off":
        return None
    return StreamedWeights(model, home=training.base, trained=True, device=device, disk=options.offload.disk)


def make_optimizer(
    model: nn.Module, options: Options, device: torch.device, weights: StreamedWeights | None
) -> torch.optim.Optimizer:
    """Return AdamW. On an accelerator it is the fused one: the other's temporaries are as large as the weights."""
    training = options.training
    settings: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    optimizer: torch.optim.Optimizer
    if training.optimizer_bits != 32:
        optimizer = low_bit_adamw(training.optimizer_bits)(model.parameters(), **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True if device.type != "cpu" else None, **settings)
    if training.optimizer_home != "off":  # hf_memopt
        optimizer = OffloadedOptimizer(optimizer, home=training.optimizer_home, disk=options.offload.disk)
    return optimizer if weights is None else weights.adopt(optimizer)  # hf_memopt


def update(run: Run, batches: Iterator[Batch]) -> Tensor:
    """Make one update of the weights; return the mean loss of this process's batches, on the device."""
    losses = []
    for _ in range(run.accelerator.gradient_accumulation_steps):
        batch = next(batches)
        with run.accelerator.accumulate(run.model):
            # Only the forward pass is in the offloader's context; backward brings its saved tensors back by itself.
            with run.memory.phase("forward"), run.saving(), run.visiting():
                loss = run.model(**batch, labels=batch["input_ids"]).loss
            with run.memory.phase("backward"):
                run.accelerator.backward(loss)
            run.end_micro_batch(loss)
            with run.memory.phase("optimizer"):
                # In the middle of a window, accelerate's optimizer and scheduler do nothing.
                if run.accelerator.sync_gradients:
                    run.before_update()
                    norm = run.options.training.max_grad_norm
                    run.accelerator.clip_grad_norm_(run.model.parameters(), norm)
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
        losses.append(loss.detach())
    run.progress.num_updates += 1
    return torch.stack(losses).mean()
