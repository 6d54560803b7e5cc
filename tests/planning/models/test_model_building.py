import json
from pathlib import Path
from typing import Any

import pytest
from transformers_toys import BATCH, TOKENS, FolderOf, estimate, step_of

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated


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
    ],
)
def test_what_shows_when_a_model_is_built_or_run(
    change: dict[str, Any], seq_len: int, message: str, qwen3: str, tmp_path: Path
) -> None:
    config = json.loads((Path(qwen3) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change | {"vocab_size": 2**31 - 1}))
    with pytest.raises(ValueError, match=message):
        run_isolated(lambda: simulate_step(step_of(str(tmp_path), seq_len=seq_len, batch_size=8)))


def test_fp16_and_bf16_take_different_kernels_on_turing(folder_of: FolderOf) -> None:
    ungrouped = folder_of("qwen3", num_attention_heads=4, num_key_value_heads=4)

    def saved_bytes(precision: str, card: str) -> int:
        settings = {"seq_len": TOKENS, "batch_size": BATCH, "precision": precision, "checkpointing": "none"}
        step = step_of(ungrouped, dtype="float32", loss="full", **settings)
        return run_isolated(lambda: simulate_step(step, gpu=card)).phases["forward"]

    assert saved_bytes("fp16", "t4") < saved_bytes("bf16", "t4")
    assert saved_bytes("fp16", "rtx4070") == saved_bytes("bf16", "rtx4070")
