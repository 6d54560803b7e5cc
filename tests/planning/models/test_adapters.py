import sys
from typing import Any

import pytest
from late_imports import LateModule
from torch import nn
from transformers_toys import BATCH, TOKENS, FolderOf, estimate

from hf_memopt.planning.models.adapters import (
    ALL_LINEAR,
    import_peft,
    with_adapters,
)

transformers = LateModule("transformers")

RANK, WIDTH, LAYERS = 3, 16, 2


@pytest.fixture
def model() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    decoder: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32))
    return decoder


def trained(model: nn.Module) -> dict[str, int]:
    """Return the sizes of trained weights by the adapted layer's name."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert ".lora_" in name
            layer = name.split(".lora_")[0].split(".")[-1]
            found[layer] = found.get(layer, 0) + parameter.numel()
    return found


def test_named_layers_get_adapters_and_all_else_is_frozen(model: nn.Module) -> None:
    adapted = with_adapters(model, RANK, "q_proj,down_proj", use_dora=False)
    assert trained(adapted) == {"q_proj": LAYERS * RANK * 2 * WIDTH, "down_proj": LAYERS * RANK * (WIDTH + 24)}
    assert not any(parameter.requires_grad for parameter in model.lm_head.parameters())


def test_all_linear_layers_are_all_but_the_outputs(model: nn.Module) -> None:
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(trained(with_adapters(model, RANK, ALL_LINEAR, use_dora=False))) == names


def test_dora_adds_a_magnitude_for_each_output(model: nn.Module) -> None:
    adapted = with_adapters(model, RANK, "down_proj", use_dora=True)
    magnitudes = [weight for name, weight in adapted.named_parameters() if "lora_magnitude" in name]
    assert [weight.shape for weight in magnitudes] == LAYERS * [(WIDTH,)]
    assert all(weight.requires_grad for weight in magnitudes)


@pytest.mark.parametrize("targets", ["nowhere", "", "q_proj;v_proj"])
def test_layers_that_the_model_does_not_have_are_named(targets: str, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"^lora_targets='{targets}': PEFT finds no such layers in the model: "):
        with_adapters(model, RANK, targets, use_dora=False)


def test_without_peft_the_option_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^lora_rank=3 needs PEFT: pip install peft$"):
        import_peft(3)


def test_adapters_are_all_that_is_trained(qwen3: str) -> None:
    rank, hidden, inner, heads = 4, 64, 128, 16 * 2
    found = estimate(qwen3, lora_rank=rank)
    # Each adapted layer has rank * (inputs + outputs) weights: q, k, v, o, gate, up, down.
    pairs = [(hidden, hidden), (hidden, heads), (hidden, heads), (hidden, hidden), *[(hidden, inner)] * 3]
    assert found.breakdown["parameters"] == 2 * 4 * rank * sum(map(sum, pairs))
    assert found.breakdown["frozen parameters"] > 10 * found.breakdown["parameters"]


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "quantize": "nf4", "precision": "bf16"}])
@pytest.mark.sweep(share=0.5)
def test_a_loss_in_tiles_keeps_no_logits(folder_of: FolderOf, options: dict[str, Any]) -> None:
    vocabulary = 40_000
    folder = folder_of("qwen3", vocab_size=vocabulary)
    full, chunked = (estimate(folder, loss=loss, **options) for loss in ("full", "chunked"))
    assert chunked.unreached == ()
    logits = BATCH * TOKENS * vocabulary * 4
    kept = full.breakdown["activations"] - chunked.breakdown["activations"]
    assert kept > 0.95 * logits
    assert full.peak_bytes - chunked.peak_bytes > logits
