"""Small configurations of transformers' models, and step estimates with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import vision_language_toys
from late_imports import LateModule

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.estimate.gpus import find_card

huggingface = LateModule("hf_memopt.jobs.huggingface")
transformers = LateModule("transformers")

FolderOf = Callable[..., str]
VOCABULARY, TOKENS, BATCH = 512, 64, 2
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16},
    "bert": {**SIZES, "vocab_size": VOCABULARY},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    | {"decoder_start_token_id": 0},
    "vit": {**SIZES, "image_size": 32, "patch_size": 8},
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    | {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY},
    "wav2vec2": {**SIZES, "vocab_size": 32, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 2)}
    | {"conv_stride": (5, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "layerdrop": 0.0}
    | {"num_conv_pos_embedding_groups": 4},
    "clip": {},
    "sam": {},
    "whisper": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    | {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY}
    | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": TOKENS, "pad_token_id": 0}
    | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **vision_language_toys.CONFIGS,
}
CARD = find_card("rtx4070")


def write_config(folder: Path, model_type: str, **changes: Any) -> str:
    """Write a changed configuration, and return its folder."""
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
