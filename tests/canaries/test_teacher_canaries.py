"""Canaries of the teacher's modes in torch, PEFT and torchao."""

import copy
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

peft = LateModule("peft")
tuners_utils = LateModule("peft.tuners.tuners_utils")
other = LateModule("peft.utils.other")


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.arguments += [id(argument) for argument in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_dispatch_modes_see_parameters_themselves(grad: bool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.set_grad_enabled(grad), Seen() as seen, relied_on_by("hf_memopt/weights/streaming/access_trace.py"):
        layer(x)
    assert {id(layer.weight), id(layer.bias)} <= set(seen.arguments)


def test_dispatch_modes_leave_the_fast_path_of_attention_alone() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 3, 8)
    want = attention(x, x, x, need_weights=False)[0]
    with Seen():
        assert torch.equal(attention(x, x, x, need_weights=False)[0], want)


def test_embeddings_are_one_operator_with_the_table_first() -> None:
    table, tokens = nn.Embedding(9, 4), torch.tensor([1, 2])
    seen: list[tuple[Any, Tensor]] = []

    class First(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args[0]))
            return func(*args, **(kwargs or {}))

    with First(), torch.no_grad():
        table(tokens)
    assert [(func, first is table.weight) for func, first in seen] == [(torch.ops.aten.embedding.default, True)]


def test_peft_names_the_layers_of_adapters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    student = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], modules_to_save=["1"], r=2))
    with relied_on_by("hf_memopt/weights/strategies/shared_base.py"):
        assert other.ModulesToSaveWrapper.adapter_layer_names == ("modules_to_save",)
        layers = [module for module in student.modules() if isinstance(module, tuners_utils.BaseTunerLayer)]
        assert layers
        assert all("lora_A" in layer.adapter_layer_names and layer.merged is False for layer in layers)


def test_torchao_lists_the_tensors_inside_a_weight(recwarn: pytest.WarningsRecorder) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, Int8WeightOnlyConfig())
    weight = model[0].weight
    with relied_on_by("hf_memopt/weights/quantised.py"):
        fields, context = weight.__tensor_flatten__()
        inner = {field: getattr(weight, field) for field in fields}
        again = type(weight).__tensor_unflatten__(inner, context, weight.size(), weight.stride())
    x = torch.randn(2, 32)
    want = copy.deepcopy(model)(x)
    inner["qdata"].data = inner["qdata"].data.clone()  # the wrapper sees a rebound inner tensor
    assert torch.equal(nn.functional.linear(x, again, model[0].bias), want)
    inner["scale"].data = 2 * inner["scale"].data
    assert not torch.equal(nn.functional.linear(x, again, model[0].bias), want)
