"""Small configurations of transformers' models, and estimates of a step with them."""

from pathlib import Path
from typing import Any

from late_imports import LateModule

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.estimate.gpus import find_card

huggingface = LateModule("hf_memopt.tuning.huggingface")
transformers = LateModule("transformers")

VOCABULARY, TOKENS, BATCH = 512, 64, 2
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16},
    "bert": {**SIZES, "vocab_size": VOCABULARY},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    | {"decoder_start_token_id": 0},
    "vit": {**SIZES, "image_size": 32, "patch_size": 8},
    "wav2vec2": {},
    "clip": {},
    "whisper": {},
}
CARD = find_card("rtx4070")


def write_config(folder: Path, model_type: str, **changes: Any) -> str:
    """Write a configuration, with changes, and return its folder."""
    transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes}).save_pretrained(folder)
    return str(folder)


def estimate(
    model: str, checkpointing: str = "none", offload: str = "off", num_micro_batches: int = 1, **options: Any
) -> MemoryEstimate:
    """Estimate an update of a few short samples."""
    settings = {"seq_len": TOKENS, "effective_batch": BATCH * num_micro_batches, "offload_threshold_mb": 0.001}
    workload = huggingface.HuggingFaceModel(model, **{**settings, **options})
    step = workload.step_with(checkpointing, offload, BATCH)
    return estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu=CARD)
