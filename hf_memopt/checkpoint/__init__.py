"""Run state on disk: checkpoints that are whole or not there, are verified before use, and resume bit for bit."""

from hf_memopt.checkpoint.batches import endless_batches
from hf_memopt.checkpoint.checkpoints import Checkpoints
from hf_memopt.checkpoint.files import find_checkpoint

__all__ = ["Checkpoints", "endless_batches", "find_checkpoint"]
