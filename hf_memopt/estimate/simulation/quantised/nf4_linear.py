"""Weights in 4 bits (NF4): `Linear4bit`, `MatMul4Bit` and `dequantize_4bit` of bitsandbytes 0.50.1."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.estimate.simulation.quantised.quantised_linear import QuantisedLinear

# Numbers that share a scale, and scales that share one of their own where these are quantised, too.
_BLOCK = 64
_BLOCK_OF_SCALES = 256


class Nf4Linear(QuantisedLinear):
    """A linear layer whose weight has half a byte for each number, and a float32 for each 64."""

    absmax: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        count, device = weight.numel(), weight.device
        self._store_scales(-(-count // _BLOCK), device)
        self.register_buffer("code", torch.empty(16, device=device), persistent=False)
        return torch.empty(-(-count // (2 * self.storage.itemsize)), 1, dtype=self.storage, device=device)

    def _store_scales(self, count: int, device: torch.device) -> None:
        self.register_buffer("absmax", torch.empty(count, device=device), persistent=False)

    def dequantize(self) -> Tensor:
        return self._unpacked(self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: Tensor = UnpackedProduct.apply(  # type: ignore[no-untyped-call]
            input.to(self.compute_dtype), bias, self._unpacked
        )
        return product.to(input.dtype)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)


class Nf4DoubleLinear(Nf4Linear):
    """The same with nested quantisation: a byte for each scale, and a float32 for each 256 scales."""

    def _store_scales(self, count: int, device: torch.device) -> None:
        self.register_buffer("absmax", torch.empty(count, dtype=torch.uint8, device=device), persistent=False)
        nested = torch.empty(-(-count // _BLOCK_OF_SCALES), device=device)
        self.register_buffer("absmax_of_scales", nested, persistent=False)
        self.register_buffer("code_of_scales", torch.empty(256, device=device), persistent=False)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        scales = self.absmax.float()  # alive while the kernel runs
        unpacked = super()._unpacked(dtype)
        del scales
        return unpacked


class UnpackedProduct(torch.autograd.Function):
    """Makes the whole weight in each direction with `unpacked(dtype)`, and keeps the packed one alone for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, unpacked: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.unpacked = unpacked
        return nn.functional.linear(input, unpacked(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.unpacked(gradient.dtype), None, None
