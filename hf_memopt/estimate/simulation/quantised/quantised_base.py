"""A model whose frozen linear layers are stored in few bits, and adapters on it.

Source: `get_keys_to_not_convert` of transformers 5.5, `prepare_model_for_kbit_training` and the layers for
bitsandbytes of PEFT 0.21.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.estimate.simulation.quantised.llm_int8_linear import LlmInt8Linear
from hf_memopt.estimate.simulation.quantised.nf4_linear import Nf4Linear
from hf_memopt.estimate.simulation.quantised.quantised_linear import QuantisedLinear
from hf_memopt.estimate.simulation.quantised.weight_only_int8_linear import WeightOnlyInt8Linear

LAYERS: dict[str, type[QuantisedLinear]] = {
    "nf4": Nf4Linear,
    "int8": LlmInt8Linear,
    "int8-torchao": WeightOnlyInt8Linear,
}
# For these PEFT has layers of its own, and makes all other weights float32.
_BITSANDBYTES = (Nf4Linear, LlmInt8Linear)


def quantise(model: nn.Module, how: str, compute_dtype: torch.dtype) -> None:
    """Freeze a transformers model without memory and store the weights of its linear layers as one of `LAYERS`.

    The output layer keeps its weights, as transformers has it. With bitsandbytes all other weights become float32.
    """
    # They bring torchao, which takes a second.
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = get_keys_to_not_convert(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and should_convert_module(name, kept):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LAYERS[how](module, compute_dtype))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if LAYERS[how] in _BITSANDBYTES and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def adapt_as_peft_does(model: nn.Module) -> None:
    """Have adapters on layers of bitsandbytes compute as PEFT's own for these do.

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
