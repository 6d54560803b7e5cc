"""Frozen weights in 4 bits (NF4), as bitsandbytes stores and multiplies them: bytes for estimates, no numbers.

Source: `Linear4bit` and `MatMul4Bit` of bitsandbytes 0.50, `prepare_model_for_kbit_training` and the layers for
bitsandbytes of PEFT 0.21.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Numbers that share a scale.
_BLOCK = 64


def quantise_nf4(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Freeze a transformers model, give its linear layers weights in NF4, and make all other weights float32.

    The output layer keeps its weights, as transformers has it. Works on models without memory alone.

    Args:
        model: changed in place.
        compute_dtype: of the products.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Nf4Linear(module, compute_dtype))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


def copy_before_adding(model: nn.Module) -> None:
    """Have the adapters of PEFT copy what a quantised layer returns before they add to it, as PEFT's own for NF4 do."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, Nf4Linear):
            base.register_forward_hook(lambda layer, inputs, output: output.clone())


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen weight has half a byte for each number, and a float32 for each 64.

    Args:
        linear: whose shape and bias it has.
        compute_dtype: of its product; what it returns has its input's type.
    """

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.compute_dtype = compute_dtype
        count, device = linear.weight.numel(), linear.weight.device
        packed = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-count // _BLOCK), device=device), persistent=False)
        self.register_buffer("code", torch.empty(16, device=device), persistent=False)

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
