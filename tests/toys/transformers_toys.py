"""Small configurations of transformers' models, and step estimates with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import vision_language_toys
from late_imports import LateModule

from hf_memopt.planning import Job, MemoryEstimate
from hf_memopt.planning.cards.gpus import find_card
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated

file_trainer = LateModule("hf_memopt.planning.workloads.file_trainer")
trainer_workload = LateModule("hf_memopt.planning.workloads.trainer_workload")
transformers = LateModule("transformers")

FolderOf = Callable[..., str]
USUAL = {"lora_dropout": 0.0, "use_rslora": False, "use_dora": False, "lora_modules_to_save": None}
VOCABULARY, TOKENS, BATCH = 512, 64, 2
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "num_local_experts": 4},
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


def workload_of(model: str, offload_threshold_mb: float = 10.0, **flags: Any) -> Any:
    """Return the workload of a model with flags."""
    return trainer_workload.TrainerWorkload(Job(model=model, **flags), None, offload_threshold_mb)


def built(options: Any, checkpointing: str = "none", device: str = "meta") -> Any:
    """Return the model of a run of any task but those of TRL, with its adapters."""
    config = options.config
    model = file_trainer.adapted(options, config, file_trainer.build_model(options, config, device), USUAL)
    if checkpointing != "none":
        options.kind_of_task.checkpoint(model)
    return model.train()


def options_of(model: str, **flags: Any) -> Any:
    return workload_of(model, **flags).given.options


def step_of(model: str, **flags: Any) -> SimulatedStep:
    step: SimulatedStep = workload_of(model, **flags).as_given()
    return step


def estimate(
    model: str, checkpointing: str = "none", offload: str = "off", num_micro_batches: int = 1, **flags: Any
) -> MemoryEstimate:
    """Estimate an update of a few short samples."""
    sizes = {"seq_len": TOKENS, "batch_size": BATCH, "accumulation": num_micro_batches, "dtype": "float32"}
    usual = {"precision": "no", "loss": "full"}
    given = {**sizes, **usual, **flags, "checkpointing": checkpointing, "offload": offload}
    step = workload_of(model, 0.001, **given).as_given()
    return run_isolated(lambda: simulate_step(step, gpu=CARD))
