import json
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from transformers_toys import BATCH, TOKENS, FolderOf, estimate

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory

huggingface = LateModule("hf_memopt.jobs.huggingface")


@pytest.mark.slow
def test_fp16_has_the_sizes_of_bf16_and_bfloat16_weights_half_of_float32(qwen3: str, plain: MemoryEstimate) -> None:
    assert estimate(qwen3, precision="fp16").peak_bytes == plain.peak_bytes
    halves = estimate(qwen3, dtype="bfloat16").breakdown["parameters"]
    # Not exactly: the weights of normalisation are rounded up to 512 bytes.
    assert halves == pytest.approx(plain.breakdown["parameters"] / 2, rel=0.02)


@pytest.mark.slow
def test_eager_attention_keeps_the_scores(folder_of: FolderOf) -> None:
    ungrouped = folder_of("qwen3", num_key_value_heads=4)
    sdpa, eager = (estimate(ungrouped, attention=attention) for attention in ("sdpa", "eager"))
    scores = 2 * BATCH * 4 * TOKENS * TOKENS * 4
    # The fused kernel keeps one number per query and head instead.
    assert eager.phases["forward"] - sdpa.phases["forward"] == pytest.approx(scores, rel=0.05)


@pytest.mark.parametrize(
    ("change", "seq_len", "message"),
    [
        (
            {"hidden_act": "nope"},
            TOKENS,
            r"transformers cannot build a model from this configuration \(KeyError: 'nope'\)",
        ),
        ({"max_position_embeddings": 2**62}, 2**31 - 1, "a tensor of this step is larger than any memory"),
    ],
)
def test_what_shows_when_a_model_is_built_or_run(
    change: dict[str, Any], seq_len: int, message: str, qwen3: str, tmp_path: Path
) -> None:
    config = json.loads((Path(qwen3) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change | {"vocab_size": 2**31 - 1}))
    workload = huggingface.HuggingFaceModel(str(tmp_path), seq_len=seq_len, effective_batch=8)

    def simulated() -> None:
        step = workload.step_with("none", "off", 8)
        estimate_peak_memory(step.setup, step.step)

    with pytest.raises(ValueError, match=message):
        simulated()


def test_fp16_and_bf16_take_different_kernels_on_turing(folder_of: FolderOf) -> None:
    ungrouped = folder_of("qwen3", num_attention_heads=4, num_key_value_heads=4)

    def saved_bytes(precision: str, card: str) -> int:
        workload = huggingface.HuggingFaceModel(ungrouped, seq_len=TOKENS, effective_batch=BATCH, precision=precision)
        step = workload.step_with("none", "off", BATCH)
        return estimate_peak_memory(step.setup, step.step, gpu=card).phases["forward"]

    assert saved_bytes("fp16", "t4") < saved_bytes("bf16", "t4")
    assert saved_bytes("fp16", "rtx4070") == saved_bytes("bf16", "rtx4070")
