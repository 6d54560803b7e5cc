"""A training run on disk: everything it needs to go on bit for bit, written whole or not at all. Read in this order:

- `checkpoints`: saves and resumes; SIGTERM and SIGINT as a wish to stop. `batches`: the order of the data, from any
  point on.
- `files`, `manifest`: folders, and their contents as saved.
- `states`: the classes that are unpickled.
"""

from hf_memopt.checkpoint.batches import endless_batches
from hf_memopt.checkpoint.checkpoints import Checkpoints
from hf_memopt.checkpoint.files import find_checkpoint

__all__ = ["Checkpoints", "endless_batches", "find_checkpoint"]
