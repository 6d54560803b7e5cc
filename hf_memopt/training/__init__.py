"""What a training step on Accelerate lacks: exact windows, a finite check, micro-batches that fit, gradient caching."""

from hf_memopt.training.chunked_loss import chunked_loss
from hf_memopt.training.finite_check import NonFiniteGradientError
from hf_memopt.training.gradient_cache import GradientCache
from hf_memopt.training.gradient_penalty import r1_penalty
from hf_memopt.training.micro_batch import MicroBatcher, find_micro_batch, split_batch
from hf_memopt.training.step import StepResult, train_step

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
