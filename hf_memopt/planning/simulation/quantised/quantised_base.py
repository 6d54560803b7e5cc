"""A model whose frozen linear layers and experts are stored in few bits, as their libraries do, and adapters on it.

Source: `Linear4bit`, `MatMul4Bit`, `dequantize_4bit`, `Linear8bitLt`, `MatMul8bitLt`, `int8_vectorwise_quant`,
`int8_mixed_scaled_mm`, `int8_mm_dequant` and `int8_vectorwise_dequant` of bitsandbytes 0.50.1, on CUDA; `Int8Tensor` of
torchao 0.18; `get_keys_to_not_convert` of transformers 5.5; `prepare_model_for_kbit_training` and the layers for
bitsandbytes of PEFT 0.21; and `Experts4bit`, as proposed to bitsandbytes (its pull request 1965), whose linear layers
have no place for weights of three dimensions, in which transformers keeps experts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# NF4: values per scale, and scales per second-level scale under double quantisation.
_BLOCK = 64
_BLOCK_OF_SCALES = 256
# `llm_int8_threshold` of transformers: numbers from here on are outliers, of which inputs are taken to have none.
_THRESHOLD = 6.0


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight is stored in few bits.

    It multiplies in `compute_dtype`, unless its library ignores that. Layers in 4 bits pack the bits in `storage`.
    """

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> None:
        nn.Module.__init__(self)
        self.storage = storage
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.compute_dtype = compute_dtype
        with linear.weight.device:
            self.weight = nn.Parameter(self._stored(linear.weight), requires_grad=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802 - the name by which PEFT asks whether a weight has to be unpacked
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight as numbers in new memory; PEFT's DoRA asks for it."""
        raise NotImplementedError

    def _stored(self, weight: Tensor) -> Tensor:
        """Return memory for the weight on the default device, and register its scales and other buffers."""
        raise NotImplementedError


class Nf4Linear(QuantisedLinear):
    """A layer of bitsandbytes whose weight has half a byte for each number (NF4), and a float32 for each 64."""

    absmax: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        self._store_scales(-(-weight.numel() // _BLOCK))
        self.register_buffer("code", torch.empty(16), persistent=False)
        return torch.empty(-(-weight.numel() // (2 * self.storage.itemsize)), 1, dtype=self.storage)

    def _store_scales(self, count: int) -> None:
        self.register_buffer("absmax", torch.empty(count), persistent=False)

    def dequantize(self) -> Tensor:
        return self._unpacked(self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: Tensor = UnpackedProduct.apply(rows, bias, self._unpacked)  # type: ignore[no-untyped-call]
        return product.to(input.dtype)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)


class Nf4DoubleLinear(Nf4Linear):
    """The same with nested quantisation: a byte for each scale, and a float32 for each 256 scales."""

    def _store_scales(self, count: int) -> None:
        self.register_buffer("absmax", torch.empty(count, dtype=torch.uint8), persistent=False)
        self.register_buffer("absmax_of_scales", torch.empty(-(-count // _BLOCK_OF_SCALES)), persistent=False)
        self.register_buffer("code_of_scales", torch.empty(256), persistent=False)

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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.unpacked(gradient.dtype), None, None


class WeightOnlyInt8Linear(QuantisedLinear):
    """A layer of torchao's `Int8WeightOnlyConfig`, whose weight has a byte for each number, and five for each row.

    It multiplies with a copy of the weight in its input's type, which autograd keeps for backward.
    """

    scale: Tensor
    zero_point: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        self.register_buffer("scale", torch.empty(self.out_features, 1), persistent=False)
        self.register_buffer("zero_point", torch.empty(self.out_features, 1, dtype=torch.int8), persistent=False)
        return torch.empty(weight.shape, dtype=torch.int8)

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


class LlmInt8Linear(QuantisedLinear):
    """A layer of bitsandbytes (LLM.int8) whose weight has a byte for each number, and a float32 for each row.

    It multiplies whole numbers and returns its input's type, with which it also multiplies in backward.
    """

    row_scales: Tensor

    def _stored(self, weight: Tensor) -> Tensor:
        self.register_buffer("row_scales", torch.empty(self.out_features), persistent=False)
        return torch.empty(weight.shape, dtype=torch.int8)

    def dequantize(self) -> Tensor:
        return self.weight * self.row_scales.view(-1, 1) * (1 / 127)

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None and self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        arguments = input, self.weight, self.row_scales, self.bias
        return _Int8Product.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


class _Int8Product(torch.autograd.Function):
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
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


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' collections of experts (`use_experts_implementation`)."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


class Nf4Experts(nn.Module):
    """The experts of a mixture in 4 bits (NF4), which take equal shares of the tokens.

    They unpack one weight at a time, in each direction. A layout other than `(experts, outputs, inputs)` is refused.
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


LAYERS: dict[str, type[QuantisedLinear]] = {
    "nf4": Nf4Linear,
    "nf4-double": Nf4DoubleLinear,
    "nf4-experts": Nf4Linear,
    "int8-llm": LlmInt8Linear,
    "int8-torchao": WeightOnlyInt8Linear,
}
# Of a number in 4 bits, with its shares of the scales.
BYTES = {"nf4": 1 / 2 + 4 / 64, "nf4-double": 1 / 2 + 1 / 64 + 4 / (64 * 256)}
# For these PEFT has layers of its own.
_BITSANDBYTES = (Nf4Linear, LlmInt8Linear)


def quantise(
    model: nn.Module,
    how: str,
    compute_dtype: torch.dtype,
    *,
    is_prepared: bool = False,
    quantises: Callable[[str], bool] | None = None,
    kept: Sequence[str] | None = None,
    storage: torch.dtype = torch.uint8,
) -> None:
    """Freeze a model without memory and store the weights of its linear layers as one of `LAYERS`.

    The layers are those whose names `quantises` is true for. Without it those that `kept` matches keep their weights,
    as transformers has it; None, the output layer. So do the experts of a mixture, except with "nf4-experts". 4 bits
    are packed in `storage`. If the model `is_prepared`, all that are not quantised become float32, as PEFT's
    `prepare_model_for_kbit_training` makes them.
    """
    quantises = quantises or _as_transformers_does(model, kept)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and quantises(name):
            model.set_submodule(name, LAYERS[how](module, compute_dtype, storage))
        if how == "nf4-experts" and are_experts(module):
            model.set_submodule(name, Nf4Experts(module, compute_dtype))
    packed = {id(layer.weight) for layer in model.modules() if isinstance(layer, QuantisedLinear)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if is_prepared and parameter.is_floating_point() and id(parameter) not in packed:
            parameter.data = parameter.data.float()


def _as_transformers_does(model: nn.Module, kept: Sequence[str] | None) -> Callable[[str], bool]:
    # They bring torchao, which takes a second.
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = get_keys_to_not_convert(model) if kept is None else list(kept)
    return lambda name: bool(should_convert_module(name, names))


def stored(model: nn.Module, kept: Sequence[str] | None = None) -> tuple[int, int]:
    """Return how many weights are in linear layers that `quantise` stores in few bits, and how many in experts."""
    quantises = _as_transformers_does(model, kept)
    modules = list(model.named_modules())
    linear = [module for name, module in modules if isinstance(module, nn.Linear) and quantises(name)]
    experts = [module for _, module in modules if are_experts(module)]
    return sum(each.weight.numel() for each in linear), sum(w.numel() for each in experts for w in each.parameters())


def adapt_as_peft_does(model: nn.Module) -> None:
    """Make adapters on layers of bitsandbytes compute as PEFT's own for these do.

    They leave their input to autocast where it is on, and copy the result of a layer in NF4 before they add to it.
    """
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, _BITSANDBYTES):
            adapter: Any = module
            adapter._cast_input_dtype = MethodType(_cast_unless_autocast, adapter)
        if isinstance(base, Nf4Linear):
            base.register_forward_hook(lambda layer, inputs, output: output.clone())


def _cast_unless_autocast(adapter: Any, input: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.is_autocast_enabled(input.device.type):
        return input
    cast: Tensor = type(adapter)._cast_input_dtype(adapter, input, dtype)
    return cast
