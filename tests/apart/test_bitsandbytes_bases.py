"""Tests of bases quantised with bitsandbytes that stream: their packed weights travel, and their scales stay."""

from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from adapters import tiny_llama, two_steps, with_adapters
from adversarial_copier import AdversarialCopier
from frozen_bases import same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt import StreamedWeights

KINDS = ["none", "non-reentrant", "reentrant"]


def quantise(model: Any, kind: str) -> None:
    """Replace the linear layers of all decoder layers."""
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                layer = make_layer(child, kind)
                layer.load_state_dict(child.state_dict())
                setattr(module, name, layer.to("cpu"))


def make_layer(linear: nn.Linear, kind: str) -> nn.Module:
    sizes = linear.in_features, linear.out_features
    if kind == "nf4":
        return bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("checkpointing", KINDS)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_are_those_of_the_resident_run(kind: str, checkpointing: str, home: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return with_adapters(tiny_llama(partial(quantise, kind=kind)), "lora", checkpointing)

    want = two_steps(build())
    model = build()
    copier = AdversarialCopier("late") if home == "host" else None
    base = StreamedWeights(model, home=home, device="cpu", copier=copier, disk=tmp_path)
    assert same(two_steps(model, base), want)
    report = base.report()
    assert report.device_bytes == 0
    assert report.peak_device_bytes < 0.5 * report.streamed_bytes


@pytest.mark.parametrize("is_called_before", [False, True])
def test_no_tensor_of_a_layer_keeps_the_bytes_in_8_bits(is_called_before: bool) -> None:
    def build() -> nn.Module:
        model = with_adapters(tiny_llama(partial(quantise, kind="int8")), "lora", "none")
        if is_called_before:
            model(torch.zeros(1, 4, dtype=torch.long))
        return model

    want = two_steps(build())
    model = build()
    layers = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear8bitLt)]
    before = [StorageWeakRef(each.weight.untyped_storage()) for each in layers]
    base = StreamedWeights(model, home="host", device="cpu", copier=AdversarialCopier("late"))
    assert all(each.expired() for each in before)
    assert same(two_steps(model, base), want)


def test_a_state_dict_has_the_packed_weights() -> None:
    model, plain = (tiny_llama(partial(quantise, kind="nf4")) for _ in range(2))
    StreamedWeights(model, home="host", device="cpu")
    got, want = model.state_dict(), plain.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
