"""A model whose frozen linear layers are stored in few bits, and adapters on it.

Source: `get_keys_to_not_convert` of transformers 5.5, `prepare_model_for_kbit_training` and the layers for
bitsandbytes of PEFT 0.21.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, accelerator
from torch import Tensor, nn

from hf_memopt.planning.simulation.quantised.quantised_linear import (
    LlmInt8Linear,
    Nf4DoubleLinear,
    Nf4Experts,
    Nf4Linear,
    QuantisedLinear,
    WeightOnlyInt8Linear,
    are_experts,
)

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


def adapters_kept_by_fsdp() -> AbstractContextManager[Any]:
    """Make FSDP2 shard trained weights in their own dtype, as Accelerate does next to 4 bits that are packed in floats.

    It asks for the weights' class, `Params4bit`, which weights without memory cannot be of.
    """
    plain = accelerator.fsdp2_prepare_model

    def prepare(by: Accelerator, model: nn.Module) -> nn.Module:
        with patch.object(by.state, "_mixed_precision", "no"):
            sharded: nn.Module = plain(by, model)
        return sharded

    return patch.object(accelerator, "fsdp2_prepare_model", prepare)


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
