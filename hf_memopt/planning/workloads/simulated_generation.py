"""Generation by GRPO's trainer on the simulated accelerator, in a few of its steps.

Each token is a forward pass that holds one more position of keys and values than the pass before. The most memory is
held either by the pass over the prompt or by the last ones, so only these run, between which the cache gets the length
that it would have grown to:

prompt, one token  |  the cache is lengthened  |  the last two tokens
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_memopt.planning.accounting.allocation_log import GENERATION
from hf_memopt.planning.simulation.device import phase_named

# Tokens of each of the two parts.
_NUM_RUN = 2


class SimulatedGeneration:
    """Makes a trainer's completions as long as they may get, and generates before each update that it runs.

    With several generations in an update each of its few passes has one, since gradients are there from the second on.
    Where a server generates nothing runs here.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, args = trainer, trainer.args
        self._passes = args.gradient_accumulation_steps
        self._single_turn = trainer._generate_single_turn
        self._scored, self._training_step = trainer._generate_and_score_completions, trainer.training_step
        trainer._generate_single_turn = self._generate
        trainer._generate_and_score_completions = self._score
        if self._passes > args.steps_per_generation * args.num_iterations:
            trainer.training_step = self._step

    def begin_update(self) -> None:
        self._trainer._step = 0

    def _step(self, *args: Any, **options: Any) -> Any:
        self.begin_update()
        return self._training_step(*args, **options)

    def _generate(self, prompts: list[Any], *args: Any, **options: Any) -> tuple[list[list[int]], Any]:
        trainer = self._trainer
        length, model = trainer.max_completion_length, trainer.accelerator.unwrap_model(trainer.model_wrapped)
        if not trainer.use_vllm:
            with _shortened(model):
                self._single_turn(prompts, *args, **options)
        probabilities = [[0.0] * length for _ in prompts] if trainer.use_vllm else None
        return [[trainer._tokenizer.pad_token_id] * length for _ in prompts], probabilities

    def _score(self, inputs: Any) -> Any:
        """Show the trainer how many passes an update has: it keeps probabilities if it generates more seldom."""
        args = self._trainer.args
        with patch.object(args, "gradient_accumulation_steps", self._passes), phase_named(GENERATION):
            return self._scored(inputs)


def generates(trainer: Any) -> bool:
    return any(kind.__name__ == "GRPOTrainer" for kind in type(trainer).__mro__)


@contextmanager
def _shortened(model: Any) -> Iterator[None]:
    """Make a model generate in a few steps, and return no more than the first new token."""
    generate = model.generate
    of_transformers = model.get_base_model() if hasattr(model, "get_base_model") else model

    def run(count: int, **options: Any) -> Any:
        remaining = iter(range(count))

        def is_unfinished(*args: Any, **kwargs: Any) -> bool:  # its own reads the tokens
            return next(remaining, None) is not None

        with patch.object(of_transformers, "_has_unfinished_sequences", is_unfinished):
            return generate(**options)

    def first_and_last(
        *, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig, **others: Any
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


def _lengthen(cache: Cache, length: int) -> None:
    """Grow a cache to `length` positions without running them; states of constant size are left unchanged."""
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
