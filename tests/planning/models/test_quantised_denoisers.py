"""Denoisers in few bits, by diffusers' own choice of layers, with adapters as its scripts have them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_toys import CONFIGS, SMALL, write_denoiser
from late_imports import LateModule
from torch import nn
from transformers_toys import built, estimate, options_of, workload_of

diffusers = LateModule("diffusers")
peft = LateModule("peft")
quantised_base = LateModule("hf_memopt.planning.simulation.quantised.quantised_base")
utilities = LateModule("diffusers.quantizers.bitsandbytes.utils")

BRAIN = {"dtype": "bfloat16", "precision": "bf16"}


# diffusers' BitsAndBytesConfig cannot be made without bitsandbytes.
IN_4_BITS = SimpleNamespace(
    quantization_method=lambda: "nf4",
    llm_int8_skip_modules=None,
    bnb_4bit_quant_storage=None,
    bnb_4bit_compute_dtype=None,
    bnb_4bit_use_double_quant=False,
    bnb_4bit_quant_type="nf4",
)


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' layer, which is not installed here."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *others: Any, **options: Any) -> None:
        super().__init__(inputs, outputs, bias)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_that_diffusers_quantises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(write_denoiser(tmp_path, name), **SMALL[name], quantize="nf4", lora_rank=2)
    task = options.kind_of_task
    ours = task.build(options.config, "it", dtype=torch.bfloat16)
    quantised_base.quantise(ours, "nf4", torch.bfloat16, quantises=task.quantises(ours))
    bitsandbytes = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit))
    monkeypatch.setattr("diffusers.quantizers.bitsandbytes.utils.bnb", bitsandbytes, raising=False)
    theirs = task.build(options.config, "it")
    kept = list(theirs._keep_in_fp32_modules or ())
    utilities._replace_with_bnb_linear(theirs, kept, quantization_config=IN_4_BITS)
    expected = {each for each, module in theirs.named_modules() if isinstance(module, Linear4bit)}
    found = {each for each, module in ours.named_modules() if isinstance(module, quantised_base.QuantisedLinear)}
    assert found == expected


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_what_is_not_quantised_and_adapters_are_float32(name: str, tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, name)
    workload = workload_of(folder, **SMALL[name], **BRAIN, quantize="nf4", lora_rank=2)
    options = workload.given.options
    model = built(options, "full")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.uint8, torch.float32}
    assert workload.name.startswith(f"{folder} as {options.config.class_name} in nf4, the rest in float32 (PEFT's prep")


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float16", torch.float32)])
def test_adapters_on_whole_weights_are_as_the_scripts_have_them(
    dtype: str, expected: torch.dtype, tmp_path: Path
) -> None:
    options = options_of(write_denoiser(tmp_path, "unet"), dtype=dtype, lora_rank=2)
    ours = built(options)
    theirs = options.kind_of_task.build(options.config, "it", dtype=getattr(torch, dtype)).requires_grad_(False)
    theirs.add_adapter(peft.LoraConfig(target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    if dtype == "float16":
        diffusers.training_utils.cast_training_params([theirs])
    for model in (ours, theirs):
        assert {each.dtype for each in model.parameters() if each.requires_grad} == {expected}


def test_parts_that_diffusers_loads_in_float32(tmp_path: Path) -> None:
    options = options_of(write_denoiser(tmp_path, "wan"), **SMALL["wan"], dtype="bfloat16")
    model = options.kind_of_task.build(options.config, "it", dtype=torch.bfloat16)
    assert model.scale_shift_table.dtype == model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("quantize", ["nf4-double", "int8-llm", "int8-torchao"])
@pytest.mark.slow
def test_few_bits_take_less(quantize: str, tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "flux", num_attention_heads=16)
    options = {**SMALL["flux"], **BRAIN, "lora_rank": 2, "checkpointing": "full"}
    assert _frozen(estimate(folder, quantize=quantize, **options)) < 0.8 * _frozen(estimate(folder, **options))


def _frozen(found: Any) -> int:
    return sum(found.breakdown.get(kind, 0) for kind in ("frozen parameters", "buffers"))
