"""The common base of linear layers with frozen weights in few bits."""

import torch
from torch import Tensor, nn


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight is stored in few bits.

    Args:
        linear: the layer with its whole weight.
        compute_dtype: in which it multiplies; a library may ignore it.
        storage: in which layers in 4 bits pack them, without a change of the bits.
    """

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> None:
        nn.Module.__init__(self)
        self.storage = storage
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.compute_dtype = compute_dtype
        self.weight = nn.Parameter(self._stored(linear.weight), requires_grad=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802 - the name by which PEFT asks whether a weight has to be unpacked
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight as numbers in new memory; PEFT's DoRA asks for it."""
        raise NotImplementedError

    def _stored(self, weight: Tensor) -> Tensor:
        """Return memory for the weight, and register its scales and other buffers."""
        raise NotImplementedError
