"""Tests of PEFT's adapters on a frozen base that streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import METHODS, tiny_llama, tiny_mixtral, two_steps, with_adapters
from adversarial_copier import AdversarialCopier
from frozen_bases import same
from torch import nn

from hf_memopt import StreamedWeights

KINDS = ["none", "non-reentrant", "reentrant"]
CASES = [(method, kind) for method in METHODS for kind in KINDS if (method, kind != "none") != ("prefix", True)]


def to_int8(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model, Int8WeightOnlyConfig())


@pytest.mark.sweep(share=0.08)
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize(("method", "checkpointing"), CASES)
def test_gradients_are_those_of_the_resident_run(method: str, checkpointing: str, precision: str) -> None:
    def build() -> nn.Module:
        model = tiny_llama(lambda model: model.bfloat16() if precision == "bfloat16" else None)
        return with_adapters(model, method, checkpointing)

    autocast = precision == "autocast"
    want = two_steps(build(), autocast=autocast)
    model = build()
    base = StreamedWeights(model, home="host", device="cpu", copier=AdversarialCopier("late"))
    assert same(two_steps(model, base, autocast), want)
    assert base.report().device_bytes == 0
    assert base.report().peak_device_bytes < 0.3 * base.report().streamed_bytes


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("checkpointing", KINDS)
@pytest.mark.sweep(share=0.4)
def test_adapters_of_parameters_train_the_same(checkpointing: str, home: str) -> None:
    def build() -> nn.Module:
        return with_adapters(tiny_mixtral(), "lora of experts", checkpointing)

    want = two_steps(build())
    model = build()
    base = StreamedWeights(model, home=home, device="cpu")
    assert same(two_steps(model, base), want)
    assert base.report().resident.keys() == {"small"}
    assert base.report().device_bytes == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("checkpointing", KINDS)
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.sweep(share=0.25)
def test_weights_quantised_with_torchao_stream(method: str, checkpointing: str, home: str) -> None:
    want = two_steps(with_adapters(tiny_llama(to_int8), method, checkpointing))
    model = with_adapters(tiny_llama(to_int8), method, checkpointing)
    base = StreamedWeights(model, home=home, device="cpu")
    model.to("cpu")  # makes other tensors inside of the quantised ones
    assert same(two_steps(model, base), want)
    assert base.report().device_bytes == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_refused_budget_leaves_quantised_weights_as_they_were() -> None:
    model = with_adapters(tiny_llama(to_int8), "lora")
    before = [*model.parameters()]
    with pytest.raises(ValueError, match=r"budget_gib=0\.0 is less than"):
        StreamedWeights(model, home="host", device="cpu", budget_gib=0.0)
    assert all(its is mine for its, mine in zip(model.parameters(), before, strict=True))
    assert same(two_steps(model), two_steps(with_adapters(tiny_llama(to_int8), "lora")))


def test_adapters_are_saved_loaded_and_switched_off(tmp_path: Path) -> None:
    import peft

    model, plain = (with_adapters(tiny_llama(), "lora") for _ in range(2))
    base = StreamedWeights(model, home="host", device="cpu")
    two_steps(model, base)
    tokens = torch.arange(8)[None]
    for each in (model, plain):
        each.eval()
    with base.stream(), torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
        want = plain.generate(tokens, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), want)
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, plain(tokens).logits)


def test_a_base_is_saved_whole(tmp_path: Path) -> None:
    import transformers

    model = with_adapters(tiny_llama(), "lora")
    StreamedWeights(model, home="host", device="cpu")
    model.unload().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same([*loaded.parameters()], [*tiny_llama().parameters()])


@pytest.mark.filterwarnings("ignore:All adapters are already merged:UserWarning")
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("safely", [False, True])
@pytest.mark.sweep(share=0.25)
def test_adapters_are_merged_after_remove(safely: bool, is_early: bool, home: Any, tmp_path: Path) -> None:
    """What is merged in a visit is an error, and there after `remove`."""
    plain, model = with_adapters(tiny_llama(), "lora"), with_adapters(tiny_llama(), "lora")
    base = StreamedWeights(model, home=home, device="cpu", disk=tmp_path)
    with pytest.raises(RuntimeError, match=r"layers.0.*is away"):
        model.merge_and_unload(safe_merge=safely)
    if is_early:
        with pytest.raises(RuntimeError, match=r"layers.0.*was written.*call remove\(\)"), base.visit(model):
            model.merge_adapter(safe_merge=safely)
        with pytest.raises(RuntimeError, match=r"was written"):
            model.state_dict()
        plain.merge_adapter(safe_merge=safely)
    base.remove()
    merged = [model.merge_and_unload(safe_merge=safely) for model in (model, plain)]
    assert same(*([*each.parameters()] for each in merged))


def test_a_model_is_loaded_from_files_and_streams_from_them(tmp_path: Path) -> None:
    import transformers

    tiny_llama().save_pretrained(tmp_path)

    def load() -> nn.Module:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return with_adapters(loaded.requires_grad_(False), "lora")

    want = two_steps(load())
    model = load()
    base = StreamedWeights(model, home="file", device="cpu")
    assert [file.name for file in base._home._block.files] == [str(tmp_path / "model.safetensors")]
    assert same(two_steps(model, base), want)
