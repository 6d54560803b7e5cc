import torch
from torch import nn

from hf_memopt.planning.simulation.quantised.quantised_base import LlmInt8Linear

ROWS, WIDTH, INNER = 3, 128, 256


def test_a_layer_keeps_a_byte_for_each_number_and_a_scale_for_each_row() -> None:
    layer = LlmInt8Linear(nn.Linear(WIDTH, INNER), torch.float16)
    assert layer.weight.nbytes == WIDTH * INNER
    assert layer.row_scales.nbytes == INNER * 4


def test_the_input_is_kept_where_hooks_do_not_see_it() -> None:
    saved: list[torch.Tensor] = []
    layer, inputs = LlmInt8Linear(nn.Linear(WIDTH, INNER), torch.float16), torch.ones(ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        output = layer(inputs)
    assert saved == []
    node: torch.autograd.function.FunctionCtx = output.grad_fn
    assert node.input.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()  # type: ignore[attr-defined]


def test_a_bias_takes_the_inputs_type_for_good() -> None:
    layer = LlmInt8Linear(nn.Linear(WIDTH, INNER), torch.float16)
    layer(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
    assert layer.bias.dtype == torch.bfloat16
