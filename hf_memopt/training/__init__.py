"""Parts of a training step that Accelerate lacks."""

from hf_memopt.training.finite_check import NonFiniteGradientError
from hf_memopt.training.gradient_cache import GradientCache
from hf_memopt.training.loss_terms import chunked_loss, r1_penalty
from hf_memopt.training.micro_batch import MicroBatcher, find_micro_batch
from hf_memopt.training.step import StepResult, train_step
from hf_memopt.training.window import split_batch

__all__ = [
    "GradientCache",
    "MicroBatcher",
    "NonFiniteGradientError",
    "StepResult",
    "chunked_loss",
    "find_micro_batch",
    "r1_penalty",
    "split_batch",
    "train_step",
]
