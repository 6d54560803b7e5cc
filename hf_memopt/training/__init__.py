"""Parts of a training step that Accelerate lacks. Read in this order:

- `step`: `train_step`, one exact update on a window of micro-batches; `accumulation`: their weights, and how ranks
  share them.
- `finite_check`: which rank, micro-batch and parameters a gradient that is not finite came from.
- `micro_batch`: micro-batches that shrink when memory runs out; `repeatable`: doing a computation twice.
- `gradient_cache`: exact gradients of losses that are no mean over samples.
- `loss_terms`: losses that take much memory, in less.
- `compile`, `low_bit`: torch.compile, and optimizers with small states.
"""

from hf_memopt.training.accumulation.splitting import split_batch
from hf_memopt.training.finite_check import NonFiniteGradientError
from hf_memopt.training.gradient_cache import GradientCache
from hf_memopt.training.loss_terms import chunked_loss, r1_penalty
from hf_memopt.training.micro_batch import MicroBatcher, find_micro_batch
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
