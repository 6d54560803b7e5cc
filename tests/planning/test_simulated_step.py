"""Models with equal layers, simulated once and whole: equal to the byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers_toys
from late_imports import LateModule

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import _estimate, _repeated, simulate_step
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated

transformers = LateModule("transformers")

GPU = "rtx4090"
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9, "num_attention_heads": 4}
TEXT |= {"vocab_size": 320, "max_position_embeddings": 256}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**GROUPED, "head_dim": 16, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 9, "n_head": 4, "vocab_size": 320, "n_positions": 256},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "opt": {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "gpt_oss": {**EXPERTS, "num_hidden_layers": 10, "num_local_experts": 4},
    "deepseek_v3": {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    "bert": TEXT,
    "vit": {**TEXT, "image_size": 32, "patch_size": 8},
}
TASKS = {"bert": "masked", "vit": "image-classification"}
WAYS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "bf16, checkpointed": {"checkpointing": "full", "precision": "bf16"},
    "bfloat16, selective, foreach": {
        "checkpointing": "selective",
        "dtype": "bfloat16",
        "optimizer": "adamw-foreach",
    },
    "LoRA, checkpointed": {"checkpointing": "full", "lora_rank": 4, "dtype": "bfloat16"},
    "fp16, eager, adafactor, two micro-batches": {
        "precision": "fp16",
        "attention": "eager",
        "optimizer": "adafactor",
        "batch_size": 1,
    },
}
# With Adafactor, the dense first layer's output dies in the second layer, which has experts.
NOT_REPEATED = {("deepseek_v3", "fp16, eager, adafactor, two micro-batches")}
OFFLOADED = {"checkpointing": "full", "offload": "inputs", "offload_threshold_mb": 1e-3}
LORA = {"lora_rank": 4, "dtype": "bfloat16"}
ALL = {"offload": "all", "offload_threshold_mb": 1e-3}
QLORA = {"lora_rank": 4, "quantize": "nf4", "dtype": "bfloat16"}
LARGE = ("gpt_oss", "deepseek_v3")
# PEFT wraps the router and hides its `e_score_correction_bias`, so that no real run starts either.
NOT_TRAINED = {("deepseek_v3", "LoRA, checkpointed")}
# One way for each model by default, all ways in `make test-slow`.
CASES = [
    pytest.param(
        model,
        way,
        id=f"{model}-{way}",
        marks=[] if number == index % len(WAYS) and model not in LARGE else pytest.mark.slow,
    )
    for index, model in enumerate(MODELS)
    for number, way in enumerate(WAYS)
    if (model, way) not in NOT_TRAINED
]


def step_of(folder: Path, model: str, **options: Any) -> SimulatedStep:
    transformers.AutoConfig.for_model(model, **MODELS[model]).save_pretrained(folder)
    task = TASKS.get(model, "causal")
    usual = {"seq_len": 64, "batch_size": 2, "task": task, "checkpointing": "none", "loss": "full", "dtype": "float32"}
    return transformers_toys.step_of(str(folder), **{**usual, **options})


def repeated(step: SimulatedStep) -> MemoryEstimate:
    assert step.repeated is not None
    layers = step.repeated
    return run_isolated(lambda: _estimate(_repeated(layers, GPU), GPU, step))


def as_estimated(step: SimulatedStep) -> MemoryEstimate:
    return run_isolated(lambda: simulate_step(step, gpu=GPU))


def whole(step: SimulatedStep) -> MemoryEstimate:
    return run_isolated(lambda: simulate_step(replace(step, repeated=None), gpu=GPU))


def check(few: MemoryEstimate, all_of_them: MemoryEstimate) -> None:
    assert few.trace == all_of_them.trace
    assert few.storage_kinds == all_of_them.storage_kinds
    for name in ("peak_bytes", "reserved_bytes", "phase", "step", "phases", "breakdown", "top", "host_bytes"):
        assert getattr(few, name) == getattr(all_of_them, name), name
    for name in ("confidence", "assumptions", "unreached"):
        assert getattr(few, name) == getattr(all_of_them, name), name
    # Launches dominate the times of so small kernels, which grow a little unevenly with layers.
    assert few.step_ms == pytest.approx(all_of_them.step_ms, rel=0.02)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's warning about experts
@pytest.mark.parametrize(("model", "way"), CASES)
@pytest.mark.sweep(share=0.15)
def test_equal_layers_are_simulated_once(model: str, way: str, tmp_path: Path) -> None:
    step = step_of(tmp_path, model, **WAYS[way])
    check(as_estimated(step) if (model, way) in NOT_REPEATED else repeated(step), whole(step))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", OFFLOADED),
        ("llama", ALL | LORA),
        *(
            pytest.param(model, OFFLOADED, marks=pytest.mark.slow)
            for model in MODELS
            if model not in ("llama", "gpt_oss")
        ),
        *(pytest.param(model, OFFLOADED | LORA, marks=pytest.mark.slow) for model in ("llama", "gpt2", "qwen3")),
        ("qwen3", ALL),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.sweep(share=0.3)
def test_a_few_layers_tell_what_offloading_in_all_does(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    step = step_of(tmp_path, model, **options)
    few, all_of_them = repeated(step), whole(step)
    check(few, all_of_them)
    assert few.host_bytes > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("options", [ALL, ALL | LORA], ids=["whole", "LoRA"])
@pytest.mark.parametrize("model", [model for model in MODELS if model not in LARGE])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_offloading_all_is_simulated_whole_where_few_layers_do_not_tell(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    step = step_of(tmp_path, model, **options)
    found, all_of_them = as_estimated(step), whole(step)
    # The attempt with few layers has made host storages that stay, and are numbered too.
    assert found.trace.changes == all_of_them.trace.changes
    assert (found.reserved_bytes, found.host_bytes) == (all_of_them.reserved_bytes, all_of_them.host_bytes)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "nf4-double", "optimizer": "adamw-8bit"},
        {},
        {"use_dora": True, "optimizer": "paged-adamw-8bit"},
        {"optimizer": "adamw-4bit"},
    ],
    ids=["double, torchao's optimizer", "LoRA", "DoRA, paged optimizer", "four bits"],
)
@pytest.mark.slow
def test_qlora(options: dict[str, Any], tmp_path: Path) -> None:
    step = step_of(tmp_path, "llama", **{**QLORA, **options})
    check(repeated(step), whole(step))


@pytest.mark.e2e
def test_too_few_layers_are_simulated_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "qwen3", {**MODELS["qwen3"], "num_hidden_layers": 4})
    step = step_of(tmp_path, "qwen3")
    assert as_estimated(step).trace == whole(step).trace
