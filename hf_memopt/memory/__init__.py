"""What memory is used for, counted."""

from hf_memopt.memory.phases import PhaseMemory
from hf_memopt.memory.saved_tensors import SavedBytes

__all__ = ["PhaseMemory", "SavedBytes"]
