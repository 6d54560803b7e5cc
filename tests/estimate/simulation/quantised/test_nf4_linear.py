import torch
from torch import nn

from hf_memopt.estimate.simulation.quantised.nf4_linear import Nf4Linear

WIDTH, INNER = 128, 256


def test_a_layer_keeps_half_a_byte_for_each_number_and_a_scale_for_64() -> None:
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.float16)
    assert layer.weight.nbytes == WIDTH * INNER / 2
    assert layer.absmax.nbytes == WIDTH * INNER / 64 * 4


def test_autograd_keeps_nothing_but_the_packed_weight() -> None:
    saved: list[torch.Tensor] = []
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        layer(torch.ones(3, WIDTH, requires_grad=True))
    assert saved == []
