import pytest
import torch
from torch import nn

from hf_memopt.planning.simulation.quantised.quantised_base import LAYERS

ROWS, WIDTH, INNER = 3, 128, 256


@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_frozen_and_passes_gradients_to_its_input(how: str, bias: bool) -> None:
    layer = LAYERS[how](nn.Linear(WIDTH, INNER, bias), torch.bfloat16)
    inputs = torch.ones(2, ROWS, WIDTH, requires_grad=True)
    output = layer(inputs)
    assert (output.dtype, output.shape) == (torch.float32, (2, ROWS, INNER))
    output.sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad.dtype, inputs.grad.shape) == (inputs.dtype, inputs.shape)
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("how", LAYERS)
def test_peft_gets_the_weight_unpacked(how: str) -> None:
    from peft.utils.integrations import dequantize_module_weight

    layer = LAYERS[how](nn.Linear(WIDTH, INNER), torch.bfloat16)
    whole = dequantize_module_weight(layer)
    # bitsandbytes unpacks its 8 bits to float32.
    assert (whole.shape, whole.dtype) == ((INNER, WIDTH), torch.float32 if how == "int8-llm" else torch.bfloat16)
    assert not whole.requires_grad
