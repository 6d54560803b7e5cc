"""transformers in a simulation: masks, kernels, auto classes, generation, and a Trainer's engine."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers.utils.import_utils as import_utils
from torch import Tensor

from hf_memopt.planning.simulation.patched_everywhere import patched_everywhere

if TYPE_CHECKING:
    from transformers import GenerationConfig, Trainer
    from transformers.cache_utils import Cache

# Tokens of each of the two parts of a shortened generation.
_NUM_RUN = 2


def masks_as_untraced() -> AbstractContextManager[None]:
    """Make attention masks as for tensors with values: `is_tracing` takes fake ones for a trace."""
    return patched_everywhere("is_tracing", import_utils.is_tracing, lambda tensor=None: False, "transformers.")


def no_hub_kernels() -> AbstractContextManager[Any]:
    """Disable the kernels of the hub in models made inside: `hub_kernels.get_kernel_hub` loads those of classes too."""
    from transformers.integrations import hub_kernels

    refusal = FileNotFoundError("kernels are code of the hub, which no estimate runs")
    return patch.object(hub_kernels, "get_kernel_hub", create=True, side_effect=refusal)


def weights_from_config(kind: Any, read: Callable[[str], Any]) -> AbstractContextManager[Any]:
    """Make an auto class's `from_pretrained` build models from the configurations that `read` returns."""

    def from_config(name: str, *, dtype: Any = None, torch_dtype: Any = None, **ignored: Any) -> Any:
        config = read(name)
        with no_hub_kernels():
            return kind.from_config(config, dtype=dtype or torch_dtype, trust_remote_code=False)

    return patch.object(kind, "from_pretrained", from_config)


def place_arguments(args: Any, device: torch.device) -> None:
    """Put a Trainer's arguments on a device: `TrainingArguments` caches its own as `_setup_devices`."""
    args.use_cpu, args._n_gpu = False, 1
    args.__dict__["_setup_devices"] = device


def prepare_once(trainer: "Trainer", batches: Any) -> None:
    """Let an engine take a Trainer's model now, and for all updates.

    `train` calls `_prepare_for_training`, which would give it to the engine in each of them, and `free_memory`.
    """
    made = trainer._prepare_for_training(1, batches, None)
    trainer._prepare_for_training = lambda *args: made
    trainer.accelerator.free_memory = lambda *args: ()


@contextmanager
def shortened_generation(model: Any) -> Iterator[None]:
    """Make a model generate in a few steps, and return no more than the first new token.

    `generate` asks `_has_unfinished_sequences` before each step, which would read the tokens. Each token is a forward
    pass that holds one more position of keys and values than the pass before. The most memory is held either by the
    pass over the prompt or by the last ones, so only these run, between which the layers of the cache get the length
    that they would have grown to:

    prompt, one token  |  the cache is lengthened  |  the last two tokens
    """
    generate = model.generate
    of_transformers = model.get_base_model() if hasattr(model, "get_base_model") else model

    def run(count: int, **options: Any) -> Any:
        remaining = iter(range(count))

        def is_unfinished(*args: Any, **kwargs: Any) -> bool:
            return next(remaining, None) is not None

        with patch.object(of_transformers, "_has_unfinished_sequences", is_unfinished):
            return generate(**options)

    def first_and_last(
        *, input_ids: Tensor, attention_mask: Tensor, generation_config: "GenerationConfig", **others: Any
    ) -> Tensor:
        num_new, num_given = generation_config.max_new_tokens, input_ids.shape[1]
        count = min(num_new, _NUM_RUN)
        few = copy.copy(generation_config)
        few.max_new_tokens, few.return_dict_in_generate, few.min_length, few.min_new_tokens = count, True, 0, None
        options = {"generation_config": few, **others}
        begun = run(count, input_ids=input_ids, attention_mask=attention_mask, **options)
        sequences: Tensor = begun.sequences
        if num_new > 2 * _NUM_RUN:
            length = num_given + num_new - _NUM_RUN
            cache = begun.past_key_values
            del begun
            _lengthen(cache, length - 1)
            rows = input_ids.shape[0]
            last = {"input_ids": input_ids.new_zeros(rows, length), "attention_mask": input_ids.new_ones(rows, length)}
            run(count, **last, past_key_values=cache, **options)
        return sequences[:, : num_given + 1]

    with patch.object(model, "generate", first_and_last):
        yield


def _lengthen(cache: "Cache", length: int) -> None:
    """Grow a cache to `length` positions without running them; states of constant size are left unchanged."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
            _resize(layer, min(length, layer.sliding_window - 1))
        elif isinstance(layer, DynamicLayer):
            _resize(layer, length)


def _resize(layer: Any, length: int) -> None:
    for name in ("keys", "values"):
        old = getattr(layer, name)
        sizes = (*old.shape[:-2], length, old.shape[-1])
        setattr(layer, name, None)
        setattr(layer, name, old.new_empty(sizes))
