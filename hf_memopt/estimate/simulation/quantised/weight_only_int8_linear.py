"""Weights in 8 bits, as torchao's `Int8WeightOnlyConfig` stores and multiplies them: `Int8Tensor` of torchao 0.18."""

import torch
from torch import Tensor

from hf_memopt.estimate.simulation.quantised.quantised_linear import QuantisedLinear


class WeightOnlyInt8Linear(QuantisedLinear):
    """A linear layer whose weight has a byte for each number, and for each row a float32 and a byte.

    It multiplies with a copy of the weight in its input's type, which autograd keeps for backward.
    """

    scale: Tensor
    zero_point: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        device = weight.device
        self.register_buffer("scale", torch.empty(self.out_features, 1, device=device), persistent=False)
        zeros = torch.empty(self.out_features, 1, dtype=torch.int8, device=device)
        self.register_buffer("zero_point", zeros, persistent=False)
        return torch.empty(weight.shape, dtype=torch.int8, device=device)

    def dequantize(self) -> Tensor:
        centred = self.weight.to(self.compute_dtype) - self.zero_point.to(self.compute_dtype)
        return (centred * self.scale).to(self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:
        product = torch.mm(input.reshape(-1, self.in_features), self.weight.t().to(input.dtype))
        scaled = product * self.scale.to(product.dtype).flatten()
        scaled = scaled.reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            scaled += self.bias
        return scaled.to(input.dtype)
