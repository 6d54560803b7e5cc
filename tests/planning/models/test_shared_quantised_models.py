"""Weights in 4 bits that several GPUs share: FSDP2 and ZeRO-3 divide them, and their scales are whole on each."""

from typing import Any

import pytest
from transformers_toys import BATCH, CARD, TOKENS, FolderOf, options_of, step_of

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

QLORA = {"lora_rank": 4, "quantize": "nf4-double", "dtype": "bfloat16", "precision": "bf16", "seq_len": TOKENS}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": False}
DIVIDING = ("fsdp2", "fsdp2-no-reshard", pytest.param("zero3", marks=pytest.mark.e2e))


@pytest.fixture(scope="module")
def model(folder_of: FolderOf) -> str:
    return folder_of("qwen3", **SIZES)


def estimated(model: str, **options: Any) -> MemoryEstimate:
    step = step_of(model, batch_size=BATCH, checkpointing="none", **QLORA | options)
    return run_isolated(lambda: simulate_step(step, gpu=CARD))


@pytest.mark.parametrize("engine", DIVIDING)
@pytest.mark.sweep(share=0.3)
def test_packed_weights_are_divided_and_scales_are_whole(engine: str, model: str) -> None:
    alone = estimated(model)
    shared = estimated(model, num_gpus=4, engine=engine)
    # DeepSpeed keeps small weights whole, between and in steps.
    assert alone.breakdown["frozen parameters"] / 4 <= shared.breakdown["frozen parameters"]
    assert shared.breakdown["frozen parameters"] < 0.3 * alone.breakdown["frozen parameters"]
    assert shared.breakdown["buffers"] == alone.breakdown["buffers"]
    assert shared.breakdown["gathered weights"] > 0
    (note,) = shared.notes
    assert "whole on each GPU" in note
    assert "bnb_4bit_quant_storage='bfloat16'" in note


@pytest.mark.slow
def test_adapters_beside_4_bits_stay_in_bfloat16_under_fsdp2(model: str) -> None:
    alone, shared = estimated(model), estimated(model, num_gpus=2, engine="fsdp2")
    assert shared.breakdown["parameters"] < 0.6 * alone.breakdown["parameters"]  # blocks have 512 bytes


@pytest.mark.parametrize(("checkpointing", "count"), [("full", 0), ("reentrant", 1)])
def test_reentrant_checkpoints_under_zero3_are_remarked_on(checkpointing: str, count: int, model: str) -> None:
    shared = QLORA | {"batch_size": BATCH, "num_gpus": 2, "engine": "zero3"}
    step = step_of(model, checkpointing=checkpointing, **shared)
    assert sum("keeps frozen weights gathered" in note for note in step.notes) == count


@pytest.mark.e2e
def test_zero2_leaves_4_bits_whole(model: str) -> None:
    alone, shared = estimated(model), estimated(model, num_gpus=2, engine="zero2")
    assert shared.breakdown["frozen parameters"] == alone.breakdown["frozen parameters"]
    assert shared.notes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "precision='bf16' with dtype='float32' and engine='fsdp2': .*; use dtype='bfloat16'"),
        ({"precision": "fp16", "dtype": "float16"}, "precision='fp16' with dtype='float16'"),
        (
            {"quantize": "int8-llm"},
            "quantize='int8-llm' with engine='fsdp2' is not simulated: .* use nf4 or",
        ),
        ({"quantize": "nf4-experts"}, "quantize='nf4-experts' with engine='fsdp2' is not simulated"),
    ],
)
def test_4_bits_that_would_not_survive_are_refused(options: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        options_of(model, batch_size=2, num_gpus=2, engine="fsdp2", **QLORA | options)


def test_published_bytes_are_not_divided(folder_of: FolderOf) -> None:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    said |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True}
    shared = QLORA | {"batch_size": 2, "num_gpus": 2, "engine": "fsdp2"}
    with pytest.raises(ValueError, match="was published with 4 bits packed in uint8, which the engine does not divide"):
        options_of(folder_of("qwen3", quantization_config=said), **shared)
    said["bnb_4bit_quant_storage"] = "bfloat16"
    assert options_of(folder_of("qwen3", quantization_config=said), **shared).packed_in == "bfloat16"
