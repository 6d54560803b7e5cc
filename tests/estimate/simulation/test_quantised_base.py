"""Frozen weights in 4 bits: what they hold, and what stays as it was."""

from pathlib import Path

import pytest
import torch
from late_imports import LateModule
from torch import nn

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.estimate.simulation.quantised_base import Nf4Linear, copy_before_adding, quantise_nf4

huggingface = LateModule("hf_memopt.tuning.huggingface")
transformers = LateModule("transformers")
peft = LateModule("peft")

WIDTH, INNER, VOCABULARY, RANK, LAYERS = 128, 256, 512, 4, 2


def config() -> object:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False)


def test_a_layer_keeps_half_a_byte_for_each_number_and_a_scale_for_64() -> None:
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.float16)
    assert layer.weight.nbytes == WIDTH * INNER / 2
    assert layer.absmax.nbytes == WIDTH * INNER / 64 * 4
    assert not layer.weight.requires_grad


def test_a_layer_multiplies_in_its_own_type_and_passes_gradients_to_its_input() -> None:
    layer = Nf4Linear(nn.Linear(WIDTH, INNER), torch.bfloat16)
    inputs = torch.ones(3, WIDTH, requires_grad=True)
    output = layer(inputs)
    assert (output.dtype, output.shape) == (torch.float32, (3, INNER))
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == inputs.shape


def test_all_but_the_linear_layers_becomes_float32_and_nothing_is_trained() -> None:
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float16)
    quantise_nf4(model, torch.float16)
    assert type(model.lm_head) is nn.Linear
    assert {type(layer) for layer in model.model.modules() if isinstance(layer, nn.Linear)} == {Nf4Linear}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.uint8}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_adapters_copy_what_a_quantised_layer_returns() -> None:
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float16)
    quantise_nf4(model, torch.float16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj"]))
    copy_before_adding(adapted)
    hooked = [name for name, module in adapted.named_modules() if module._forward_hooks]
    assert len(hooked) == LAYERS
    assert all(name.endswith("q_proj.base_layer") for name in hooked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config().save_pretrained(path)  # type: ignore[attr-defined]
    return path


def estimated(folder: Path, **options: str) -> MemoryEstimate:
    model = huggingface.HuggingFaceModel(str(folder), seq_len=32, effective_batch=2, lora_rank=RANK, **options)
    step = model.step_with("full", "off", 2)
    return estimate_peak_memory(step.setup, step.step)


def test_a_model_is_estimated_with_its_weights_in_4_bits(folder: Path) -> None:
    quantised = estimated(folder, quantize="nf4", dtype="float16", lora_targets="q_proj,v_proj").breakdown
    numbers = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    others = 2 * VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH
    assert quantised["frozen parameters"] == numbers / 2 + 4 * others
    # Each of the adapters has rank * (inputs + outputs) numbers.
    assert quantised["parameters"] == LAYERS * 2 * RANK * 2 * WIDTH * 4


def test_float16_weights_take_two_bytes(folder: Path) -> None:
    half, single = (estimated(folder, dtype=dtype).breakdown["frozen parameters"] for dtype in ("float16", "float32"))
    assert half == pytest.approx(single / 2, rel=0.01)


def test_quantised_weights_need_adapters_and_adapters_layers(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"quantize='nf4' and .* are for adapters; give a lora_rank"):
        huggingface.HuggingFaceModel(str(folder), seq_len=32, quantize="nf4")
    with pytest.raises(ValueError, match="lora_targets='nowhere': PEFT finds no such layers"):
        estimated(folder, lora_targets="nowhere")
