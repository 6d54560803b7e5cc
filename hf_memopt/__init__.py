"""Training that fits in the memory you have, with the same gradients."""

__version__ = "0.1.0"
