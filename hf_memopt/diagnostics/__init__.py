"""What this machine has, what it allows, and which features of this library are on there."""

from hf_memopt.diagnostics.machine import Machine, examine
from hf_memopt.diagnostics.page import page

__all__ = ["Machine", "examine", "page"]
