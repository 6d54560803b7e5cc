"""Tensors that are nothing but a piece of memory and a view of it."""

from torch import Tensor

# Subclasses need more in general. A simulation adds its fake tensors.
PLAIN_TYPES: set[type[Tensor]] = {Tensor}
