import pytest
import torch
from torch import nn

from hf_memopt.planning.simulation.quantised.quantised_base import Nf4DoubleLinear, Nf4Linear

WIDTH, INNER = 128, 256


def test_a_layer_keeps_half_a_byte_for_each_number_and_a_scale_for_64() -> None:
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.float16)
    assert layer.weight.nbytes == WIDTH * INNER / 2
    assert layer.absmax.nbytes == WIDTH * INNER / 64 * 4


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_floats_pack_the_same_bytes(storage: torch.dtype) -> None:
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.float16, storage)
    assert layer.weight.dtype == storage
    assert layer.weight.shape == (WIDTH * INNER // 2 // storage.itemsize, 1)
    assert layer(torch.ones(3, WIDTH, dtype=torch.float16)).dtype == torch.float16


def test_autograd_keeps_nothing_but_the_packed_weight() -> None:
    saved: list[torch.Tensor] = []
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        layer(torch.ones(3, WIDTH, requires_grad=True))
    assert saved == []


def test_nested_quantisation_keeps_a_byte_for_each_scale() -> None:
    layer = Nf4DoubleLinear(nn.Linear(WIDTH, INNER), torch.float16)
    scales = WIDTH * INNER // 64
    assert (layer.absmax.nbytes, layer.absmax_of_scales.nbytes) == (scales, scales / 256 * 4)
    assert layer(torch.ones(3, WIDTH)).shape == (3, INNER)
    assert layer.dequantize().shape == (INNER, WIDTH)
