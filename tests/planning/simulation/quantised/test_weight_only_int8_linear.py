from typing import Any

import torch
from late_imports import LateModule
from torch import nn

from hf_memopt.planning.simulation.quantised.quantised_base import WeightOnlyInt8Linear

quantization = LateModule("torchao.quantization")

ROWS, WIDTH, INNER = 3, 128, 256


def real(linear: nn.Linear) -> nn.Module:
    holder = nn.Sequential(linear)
    quantization.quantize_(holder, quantization.Int8WeightOnlyConfig())
    return holder


def test_a_layer_stores_what_torchaos_stores() -> None:
    linear = nn.Linear(WIDTH, INNER, dtype=torch.bfloat16)
    ours = WeightOnlyInt8Linear(linear, torch.bfloat16)
    weight: Any = next(real(linear).parameters())
    parts = (weight.qdata, weight.scale, weight.zero_point)
    assert [(part.shape, part.dtype) for part in (ours.weight, ours.scale, ours.zero_point)] == [
        (part.shape, part.dtype) for part in parts
    ]
    assert ours.dequantize().dtype == weight.dequantize().dtype


def kept(layer: nn.Module) -> list[tuple[torch.Size, torch.dtype]]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
        layer(torch.ones(2, ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    return [(each.shape, each.dtype) for each in saved]


def test_autograd_keeps_what_it_keeps_of_torchaos_layer() -> None:
    linear = nn.Linear(WIDTH, INNER, dtype=torch.bfloat16)
    ours = kept(WeightOnlyInt8Linear(linear, torch.bfloat16))
    assert ours == kept(real(linear))
    assert ours[0] == ((WIDTH, INNER), torch.bfloat16)
