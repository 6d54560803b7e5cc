"""A training run on disk: everything it needs to go on bit for bit, written whole or not at all."""

from hf_memopt.checkpoint.batches import endless_batches
from hf_memopt.checkpoint.checkpoints import Checkpoints
from hf_memopt.checkpoint.files import find_checkpoint

__all__ = ["Checkpoints", "endless_batches", "find_checkpoint"]
