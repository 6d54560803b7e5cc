"""The experts of a mixture in 4 bits (NF4): `Experts4bit`, as proposed to bitsandbytes (its pull request 1965).

Linear layers of bitsandbytes have no place for weights of three dimensions, in which transformers keeps experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.estimate.simulation.quantised.quantised_linear import UnpackedProduct

# Numbers that share a scale.
_BLOCK = 64


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' collections of experts (`use_experts_implementation`)."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


class Nf4Experts(nn.Module):
    """Experts that unpack one weight at a time, in each direction, and take equal shares of the tokens.

    Raises:
        ValueError: the experts are stored in another layout than `(experts, outputs, inputs)`, or have biases.
    """

    def __init__(self, experts: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        weights = [name for name, weight in experts.named_parameters(recurse=False) if weight.dim() == 3]
        if weights != ["gate_up_proj", "down_proj"] or experts.is_transposed or experts.has_bias:
            raise ValueError(
                f"quantize='nf4-experts': {type(experts).__name__} stores its experts otherwise than Experts4bit can; "
                "use quantize='nf4', which leaves them as they are"
            )
        self.act_fn, self.has_gate, self.compute_dtype = experts.act_fn, experts.has_gate, compute_dtype
        self.num_experts = experts.gate_up_proj.shape[0]
        self._shapes = tuple(tuple(getattr(experts, name).shape[1:]) for name in weights)
        self.gate_up, self.down = (self._packed(getattr(experts, name), name) for name in weights)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        states = hidden_states.to(self.compute_dtype)
        summed = torch.zeros_like(states)
        gate_up, down = (partial(self._unpacked, shape) for shape in self._shapes)
        mask = nn.functional.one_hot(top_k_index, num_classes=self.num_experts)  # as the experts make it
        share = -(-top_k_index.numel() // self.num_experts)
        for _ in range(self.num_experts):
            tokens, places = torch.zeros(2, share, dtype=torch.long, device=mask.device)
            product = UnpackedProduct.apply(states[tokens], None, gate_up)  # type: ignore[no-untyped-call]
            if self.has_gate:
                gate, up = product.chunk(2, dim=-1)
                product = self.act_fn(gate) * up
            else:
                product = self.act_fn(product)
            product = UnpackedProduct.apply(product, None, down)  # type: ignore[no-untyped-call]
            product = product * top_k_weights[tokens, places, None]
            summed.index_add_(0, tokens, product.to(summed.dtype))
        return summed.to(hidden_states.dtype)

    def _packed(self, weight: Tensor, name: str) -> nn.Parameter:
        """Return memory for a weight, and register that for its scales."""
        each = weight[0].numel()
        scales = torch.empty(self.num_experts, each // _BLOCK, device=weight.device)
        self.register_buffer(f"{name}_absmax", scales, persistent=False)
        packed = torch.empty(self.num_experts, each // 2, dtype=torch.uint8, device=weight.device)
        return nn.Parameter(packed, requires_grad=False)

    def _unpacked(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.gate_up.device)
