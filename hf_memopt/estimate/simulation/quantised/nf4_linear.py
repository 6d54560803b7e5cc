"""Weights in 4 bits (NF4): `Linear4bit`, `MatMul4Bit` and `dequantize_4bit` of bitsandbytes 0.50.1."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.estimate.simulation.quantised.quantised_linear import QuantisedLinear

# Numbers that share a scale.
_BLOCK = 64


class Nf4Linear(QuantisedLinear):
    """A linear layer whose weight has half a byte for each number, and a float32 for each 64."""

    def _stored(self, weight: Tensor) -> Tensor:
        count, device = weight.numel(), weight.device
        self.register_buffer("absmax", torch.empty(-(-count // _BLOCK), device=device), persistent=False)
        self.register_buffer("code", torch.empty(16, device=device), persistent=False)
        return torch.empty(-(-count // 2), 1, dtype=torch.uint8, device=device)

    def dequantize(self) -> Tensor:
        return _unpacked(self.weight, (self.out_features, self.in_features), self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:
        shape = self.out_features, self.in_features
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to(self.compute_dtype), self.weight, bias, shape
        )
        return product.to(input.dtype)


class _Product(torch.autograd.Function):
    """Makes the whole weight in each direction, and keeps the packed one alone for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        ctx.packed, ctx.shape = packed, shape
        return nn.functional.linear(input, _unpacked(packed, shape, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ _unpacked(ctx.packed, ctx.shape, gradient.dtype), None, None, None


def _unpacked(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=packed.device)
