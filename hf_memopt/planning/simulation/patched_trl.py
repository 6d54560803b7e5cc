"""TRL in a simulation: its fused output layer, its trainers' constructors, and the generation of GRPO's."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_memopt.planning.simulation.patched_transformers import shortened_generation


@contextmanager
def fused_head_as_on_cuda() -> Iterator[None]:
    """Make TRL's fused output layer take as much memory as Triton's kernels on CUDA, if TRL was imported.

    On other devices TRL reduces the tiles of logits with torch's operations, which allocate temporaries, and scores
    every position. Source: `ChunkedLogProbFunction` and `add_fused_lm_head` of TRL 1.16.
    """
    kernels, caller = (sys.modules.get(name) for name in ("trl.kernels.chunked_logprob", "trl.trainer.utils"))
    with ExitStack() as stack:
        if kernels is not None:
            stack.enter_context(patch.object(kernels, "_forward_tile", _fold_tile))
            stack.enter_context(patch.object(kernels, "_backward_tile", _fold_tile))
            stack.enter_context(patch.object(kernels, "_addmm_fp32", _add_product))
        if caller is not None and hasattr(caller, "_use_triton"):
            stack.enter_context(patch.object(caller, "_use_triton", lambda device: True))
        yield


def _fold_tile(tile: Tensor, *others: Any, **settings: Any) -> None:
    tile.zero_()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Multiply without memory for the product, which is added in float32: it lies where the sum does."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : right.shape[1]])


def without_server(arguments: Any) -> AbstractContextManager[Any]:
    """Make a trainer without `use_vllm`: one that generates on a server would ask the server when it is made."""
    return patch.object(arguments, "use_vllm", False, create=True)


@contextmanager
def plugin_without_engine(kind: Any, arguments: Any, plugin: Any) -> Iterator[None]:
    """Show TRL a plugin of DeepSpeed, or None, by which it decides on adapters and checkpoints, but start no engine.

    `__init__` starts it in `create_accelerator_and_postprocess`, and TRL reads the arguments' `deepspeed_plugin`.
    """
    plain = kind.create_accelerator_and_postprocess

    def without_engine(trainer: Any) -> None:
        with patch.object(arguments, "deepspeed_plugin", None):
            plain(trainer)

    with (
        patch.object(arguments, "deepspeed_plugin", plugin),
        patch.object(kind, "create_accelerator_and_postprocess", without_engine),
    ):
        yield


@contextmanager
def reference_built_by(kind: Any, build: Callable[[], Any]) -> Iterator[None]:
    """Make a trainer's reference model by `build`, on no device, instead of loading its weights.

    Trainers load it by the `create_model_from_path` of their module, and move it to the device.
    """
    made: list[Any] = []

    def create(path: str, **options: Any) -> Any:
        made.append(build().requires_grad_(False))
        made[-1].to = lambda *args, **options: made[-1]
        return made[-1]

    with patch.object(importlib.import_module(kind.__module__), "create_model_from_path", create, create=True):
        yield
    for model in made:
        del model.to


@contextmanager
def marked(model: Any, mark: str | None) -> Iterator[None]:
    """Set an attribute by which TRL recognises weights in few bits, such as `is_loaded_in_4bit`, and remove it again.

    If it stayed, transformers would look for bitsandbytes.
    """
    if mark is None:
        yield
        return
    setattr(model, mark, True)
    yield
    delattr(model, mark)


def generates(trainer: Any) -> bool:
    return any(kind.__name__ == "GRPOTrainer" for kind in type(trainer).__mro__)


class SimulatedGeneration:
    """Makes a trainer's completions as long as they may get, and generates before each update that it runs.

    With several generations in an update each of its few passes has one, since gradients are there from the second on.
    Where a server generates nothing runs here. The trainer calls `_generate_single_turn` for new tokens, in
    `_generate_and_score_completions`, at each update whose `_step` is a multiple of the steps between generations.

    Args:
        trainer: of the class GRPOTrainer.
        phase: makes a context that is open while the trainer generates.
    """

    def __init__(self, trainer: Any, phase: Callable[[], AbstractContextManager[None]]) -> None:
        self._trainer, self._phase, args = trainer, phase, trainer.args
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
            with shortened_generation(model):
                self._single_turn(prompts, *args, **options)
        probabilities = [[0.0] * length for _ in prompts] if trainer.use_vllm else None
        return [[trainer._tokenizer.pad_token_id] * length for _ in prompts], probabilities

    def _score(self, inputs: Any) -> Any:
        """Show the trainer how many passes an update has: it keeps probabilities if it generates more seldom."""
        args = self._trainer.args
        with patch.object(args, "gradient_accumulation_steps", self._passes), self._phase():
            return self._scored(inputs)
