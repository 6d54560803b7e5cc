"""Checkpoints in few bits: trained as they were published, as transformers dequantises them, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import nn
from transformers_toys import FolderOf, built, estimate, workload_of

quantised_base = LateModule("hf_memopt.planning.simulation.quantised.quantised_base")
transformers = LateModule("transformers")

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NF4 |= {"bnb_4bit_compute_dtype": "bfloat16"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def model(folder: str, **options: Any) -> Any:
    return workload_of(folder, seq_len=32, batch_size=1, checkpointing="none", **options)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (NF4, "nf4"),
        (NF4 | {"bnb_4bit_use_double_quant": True}, "nf4-double"),
        (INT8, "int8-llm"),
    ],
)
@pytest.mark.sweep(share=0.3)
def test_a_checkpoint_says_how_its_weights_are_stored(said: dict[str, Any], found: str, folder_of: FolderOf) -> None:
    folder = folder_of("qwen3", quantization_config=said, dtype="bfloat16")
    published = model(folder, lora_rank=2)
    assert f" as {found}, as the checkpoint says, the rest in bfloat16" in published.name
    stored = estimate(folder, lora_rank=2).breakdown
    asked = estimate(folder_of("qwen3", dtype="bfloat16"), lora_rank=2, quantize=found).breakdown
    assert stored["frozen parameters"] == asked["frozen parameters"]
    assert stored["buffers"] == asked["buffers"]


def test_skipped_layers_keep_their_weights_and_no_other(folder_of: FolderOf) -> None:
    said = NF4 | {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"], "bnb_4bit_compute_dtype": "float16"}
    config = {"quantization_config": said, "dtype": "bfloat16", "num_hidden_layers": 6, "layer_types": None}
    published = model(folder_of("qwen3", **config), lora_rank=2, lora_targets="q_proj")
    assert published.as_given().repeated is None
    config["quantization_config"] = NF4
    assert model(folder_of("qwen3", **config), lora_rank=2).as_given().repeated is not None
    model_built = built(published.given.options)
    kinds = {name: type(layer) for name, layer in model_built.named_modules() if isinstance(layer, nn.Linear)}
    whole = {name for name, kind in kinds.items() if kind is nn.Linear and "lora" not in name}
    assert {name.partition("base_model.model.")[2] for name in whole} == {
        "lm_head",
        *(f"model.layers.0.mlp.{each}" for each in ("gate_proj", "up_proj", "down_proj")),
    }
    (compute_dtype,) = {
        layer.compute_dtype for layer in model_built.modules() if isinstance(layer, quantised_base.Nf4Linear)
    }
    assert compute_dtype == torch.float16


def test_weights_in_mxfp4_are_dequantised_and_said_to_be(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_local_experts": 4}
    config = transformers.GptOssConfig(**sizes, quantization_config=MXFP4)
    config.save_pretrained(tmp_path)
    published = model(str(tmp_path))
    assert published.given.options.dtype == "bfloat16"
    (note,) = published.as_given().notes
    assert note == (
        "The checkpoint is in MXFP4, which transformers does not train: load it with "
        "quantization_config=Mxfp4Config(dequantize=True), and the experts are trained in bfloat16, as simulated here."
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "fp8"},
            r"='fp8': transformers does not train FP8, .*\(dequantize=True\); remove",
        ),
        ({"quant_method": "awq"}, "quant_method='awq': training adapters on AWQ is not simulated; name the checkpoint"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors': .*run_compressed=False"),
        ({"quant_method": "aqlm"}, "quant_method='aqlm'.* is not simulated; name the checkpoint that it was made from"),
        (INT8 | {"llm_int8_threshold": 0.0}, "llm_int8_threshold=0.0 is not simulated; only 6.0 is"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' is not simulated; write 'nf4'"),
        ({"quant_method": "bitsandbytes"}, "quantization_config has neither load_in_4bit nor load_in_8bit; remove it"),
    ],
)
def test_other_checkpoints_are_refused_by_name(said: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    folder = folder_of("qwen3", quantization_config=said)
    with pytest.raises(ValueError, match=f"^model='{folder}': .*{message}"):
        model(folder, lora_rank=2)


@pytest.mark.parametrize(("said", "kind"), [(NF4, "nf4"), (MXFP4, "MXFP4")])
def test_a_checkpoint_is_not_quantised_otherwise(said: dict[str, Any], kind: str, folder_of: FolderOf) -> None:
    folder = folder_of("qwen3", quantization_config=said)
    with pytest.raises(ValueError, match=f"^quantize='int8-llm': .* was published in {kind}, .*; leave it out"):
        model(folder, lora_rank=2, quantize="int8-llm")


def test_few_bits_need_adapters(folder_of: FolderOf) -> None:
    folder = folder_of("qwen3", quantization_config=NF4)
    with pytest.raises(ValueError, match="was published in nf4, which does not train; give lora_rank"):
        model(folder)
