"""Weights in 8 bits (LLM.int8), as bitsandbytes stores and multiplies them with transformers' threshold.

Source: `Linear8bitLt`, `MatMul8bitLt`, `int8_vectorwise_quant`, `int8_mixed_scaled_mm`, `int8_mm_dequant` and
`int8_vectorwise_dequant` of bitsandbytes 0.50.1, on CUDA. Inputs are taken to have no outliers.
"""

from typing import Any

import torch
from torch import Tensor

from hf_memopt.estimate.simulation.quantised.quantised_linear import QuantisedLinear

# `llm_int8_threshold` of transformers: numbers from here on are outliers.
_THRESHOLD = 6.0


class LlmInt8Linear(QuantisedLinear):
    """A linear layer whose weight has a byte for each number, and a float32 for each row.

    It multiplies whole numbers and returns its input's type, with which it also multiplies in backward.
    """

    row_scales: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        rows = torch.empty(self.out_features, device=weight.device)
        self.register_buffer("row_scales", rows, persistent=False)
        return torch.empty(weight.shape, dtype=torch.int8, device=weight.device)

    def dequantize(self) -> Tensor:
        return self.weight * self.row_scales.view(-1, 1) * (1 / 127)

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None and self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.row_scales, self.bias
        )
        return product


class _Product(torch.autograd.Function):
    """Keeps its input where saved-tensor hooks do not see it: checkpointing and offloading leave it on the device."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        whole, _scales = _quantised(rows.to(torch.float16))
        product = _scaled_product(whole, weight, bias, input.dtype)
        ctx.weight, ctx.row_scales, ctx.input_shape = weight, row_scales, input.shape
        ctx.input = rows if ctx.needs_input_grad[0] else None
        return product.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        dtype = ctx.input.dtype
        weight = ctx.weight.to(dtype, copy=True).mul_(ctx.row_scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(rows.to(dtype), weight).view(ctx.input_shape), None, None, None


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.empty(len(rows), device=rows.device)
    whole = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    outliers = rows.abs() >= _THRESHOLD
    outliers.any()
    return whole, scales


def _scaled_product(whole: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    sums = torch._int_mm(whole, weight.t())
    product = torch.empty_like(sums, dtype=torch.float16)
    # The kernel adds a bias in float16 alone.
    if bias is not None and bias.dtype != torch.float16:
        product.add_(bias)
    return product.to(dtype)
