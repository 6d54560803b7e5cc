"""Models with frozen quantised weights: their memory, and the unchanged layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import nn
from transformers_toys import step_of

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.quantised.quantised_base import LAYERS, Nf4Linear, adapt_as_peft_does, quantise

transformers = LateModule("transformers")
peft = LateModule("peft")

WIDTH, INNER, VOCABULARY, RANK, DEPTH = 128, 256, 512, 4, 2
BATCH, SEQ_LEN = 2, 32
TOKENS = BATCH * SEQ_LEN
# Of CUDA's allocator.
BLOCK = 512


def config() -> object:
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
    }
    return transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False)


@pytest.mark.parametrize(("is_prepared", "others"), [(True, torch.float32), (False, torch.float16)])
def test_peft_makes_all_but_the_linear_layers_float32_and_nothing_is_trained(
    is_prepared: bool, others: torch.dtype
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float16)
    quantise(model, "nf4", torch.float16, is_prepared=is_prepared)
    assert type(model.lm_head) is nn.Linear
    assert {type(layer) for layer in model.model.modules() if isinstance(layer, nn.Linear)} == {Nf4Linear}
    assert {parameter.dtype for parameter in model.parameters()} == {others, torch.uint8}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_preparation_leaves_packed_weights() -> None:
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    quantise(model, "nf4", torch.bfloat16, is_prepared=True, storage=torch.bfloat16)
    packed = {layer.weight.dtype for layer in model.modules() if isinstance(layer, Nf4Linear)}
    assert (packed, model.lm_head.weight.dtype) == ({torch.bfloat16}, torch.float32)


def test_adapters_copy_what_a_quantised_layer_returns() -> None:
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float16)
    quantise(model, "nf4", torch.float16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj"]))
    adapt_as_peft_does(adapted)
    hooked = [name for name, module in adapted.named_modules() if module._forward_hooks]
    assert len(hooked) == DEPTH
    assert all(name.endswith("q_proj.base_layer") for name in hooked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config().save_pretrained(path)  # type: ignore[attr-defined]
    return path


def estimated(folder: Path, **options: Any) -> MemoryEstimate:
    usual = {"seq_len": SEQ_LEN, "batch_size": BATCH, "lora_rank": RANK, "checkpointing": "full", "precision": "no"}
    step = step_of(str(folder), **{**usual, "loss": "full", **options})
    return run_isolated(lambda: simulate_step(step))


@pytest.mark.parametrize(("kbit_preparation", "num_bytes"), [("peft", 4), ("trl", 2)])
def test_a_model_is_estimated_with_its_weights_in_4_bits(folder: Path, kbit_preparation: str, num_bytes: int) -> None:
    options = {"quantize": "nf4", "kbit_preparation": kbit_preparation, "dtype": "float16"}
    quantised = estimated(folder, **options, lora_targets="q_proj,v_proj").breakdown
    numbers = DEPTH * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    norms = (2 * DEPTH + 1) * max(BLOCK, WIDTH * num_bytes)
    assert quantised["frozen parameters"] == numbers / 2 + 2 * VOCABULARY * WIDTH * num_bytes + norms
    # Each adapter has rank * (inputs + outputs) numbers.
    assert quantised["parameters"] == DEPTH * 2 * RANK * 2 * WIDTH * num_bytes


@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.sweep(share=0.4)
def test_dora_unpacks_the_weights(folder: Path, how: str) -> None:
    options = {"quantize": how, "dtype": "bfloat16", "lora_targets": "down_proj"}
    plain, dora = (estimated(folder, **options, use_dora=use_dora) for use_dora in (False, True))
    num_bytes = 4 if how == "int8-torchao" else 2  # TRL's trainers cast adapters on layers of bitsandbytes
    magnitudes = DEPTH * max(BLOCK, WIDTH * num_bytes)
    assert dora.breakdown["parameters"] - plain.breakdown["parameters"] == magnitudes
    assert dora.unreached == ()


def test_bitsandbytes_8_bits_keep_inputs_in_spite_of_checkpointing(folder: Path) -> None:
    """Count the inputs per token of attention, of both halves of the MLP, and of the last layer of each."""
    options = {"kbit_preparation": "peft", "dtype": "bfloat16", "lora_targets": "q_proj"}
    int8, nf4 = (estimated(folder, quantize=how, **options) for how in ("int8-llm", "nf4"))
    inputs = DEPTH * TOKENS * (3 * WIDTH + INNER) * 4
    frozen = int8.breakdown["frozen parameters"] - nf4.breakdown["frozen parameters"]
    scales = int8.breakdown["buffers"] - nf4.breakdown["buffers"]
    assert int8.phases["forward"] - nf4.phases["forward"] > 0.9 * inputs + frozen + scales


def test_float16_weights_take_two_bytes(folder: Path) -> None:
    half, single = (estimated(folder, dtype=dtype).breakdown["frozen parameters"] for dtype in ("float16", "float32"))
    assert half == pytest.approx(single / 2, rel=0.01)


def test_quantised_weights_need_adapters_and_adapters_layers(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"quantize='nf4': for adapters; give lora_rank, such as lora_rank=16"):
        step_of(str(folder), seq_len=32, quantize="nf4")
    with pytest.raises(ValueError, match="lora_targets='nowhere': PEFT finds no such layers"):
        estimated(folder, lora_targets="nowhere")
