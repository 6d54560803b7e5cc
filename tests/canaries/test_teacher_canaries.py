"""Canaries of the teacher's modes in torch, PEFT and torchao."""

import copy

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn

peft = LateModule("peft")
tuners_utils = LateModule("peft.tuners.tuners_utils")
other = LateModule("peft.utils.other")


def test_peft_names_the_layers_of_adapters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    student = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], modules_to_save=["1"], r=2))
    with relied_on_by("hf_memopt/weights/strategies/placement.py"):
        assert other.ModulesToSaveWrapper.adapter_layer_names == ("modules_to_save",)
        layers = [module for module in student.modules() if isinstance(module, tuners_utils.BaseTunerLayer)]
        assert layers
        assert all("lora_A" in layer.adapter_layer_names and layer.merged is False for layer in layers)


def test_torchao_lists_the_tensors_inside_a_weight(recwarn: pytest.WarningsRecorder) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, Int8WeightOnlyConfig())
    weight = model[0].weight
    with relied_on_by("hf_memopt/weights/homes/packed_weights.py"):
        fields, context = weight.__tensor_flatten__()
        inner = {field: getattr(weight, field) for field in fields}
        again = type(weight).__tensor_unflatten__(inner, context, weight.size(), weight.stride())
    x = torch.randn(2, 32)
    want = copy.deepcopy(model)(x)
    inner["qdata"].data = inner["qdata"].data.clone()  # the wrapper sees a rebound inner tensor
    assert torch.equal(nn.functional.linear(x, again, model[0].bias), want)
    inner["scale"].data = 2 * inner["scale"].data
    assert not torch.equal(nn.functional.linear(x, again, model[0].bias), want)
