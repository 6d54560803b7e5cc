"""Configurations of all model types in transformers: the class's defaults, with few layers and few experts."""

import copy
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 2, 4, 2

_LAYERS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "num_blocks", "depth", "num_encoder_layers"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "resampler_depth"),
    *("decoder_num_hidden_layers", "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"),
    *("num_global_layers", "num_self_attends_per_block"),
}
_EXPERTS = {
    *("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts", "zero_expert_num"),
}
_CHOSEN = {"num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"}
# Places of other kinds of layers, where the default is past the second layer, and groups of experts.
_PLACES = {
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "global_attn_indexes": [1],
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "cross_attention_layers": [1],
    "intermediate_layers_indices": [0, 1],
    "hybrid_layer_ids": [1],
    "full_attn_idxs": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "moe_layers": [1],
    "vision_feature_layers": [-2, -1],
    "n_group": 1,
    "topk_group": 1,
}
# Made from other fields, or a field of every configuration.
_DERIVED = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices", "full_attn_idxs"}
_DERIVED |= PreTrainedConfig().to_dict().keys() - {"is_encoder_decoder"}

_BERT = {"model_type": "bert", "num_hidden_layers": NUM_LAYERS}
_DECODER = _BERT | {"is_decoder": True, "add_cross_attention": True}
_START = {"decoder_start_token_id": 0, "pad_token_id": 0}
_T5 = {"model_type": "t5", "num_layers": NUM_LAYERS}
_ENCODEC = {"model_type": "encodec"}
_IN_SPACE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_PARTS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": _BERT, "decoder": _DECODER} | _START,
    "vision-encoder-decoder": {"encoder": {"model_type": "vit", "num_hidden_layers": 2}, "decoder": _DECODER} | _START,
    "speech-encoder-decoder": {"encoder": {"model_type": "wav2vec2", "num_hidden_layers": 2}, "decoder": _DECODER}
    | _START,
    "musicgen": {"text_encoder": _T5, "audio_encoder": _ENCODEC, "decoder": {"num_hidden_layers": NUM_LAYERS}},
    "musicgen_melody": {"text_encoder": _T5, "audio_encoder": _ENCODEC, "decoder": {"num_hidden_layers": NUM_LAYERS}},
}
# What published configurations say, and the class's defaults leave out or make no model of.
_SAID: dict[str, dict[str, Any]] = {
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 2048},
        "attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0},
    },
    "deepseek_v2": {"num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": NUM_CHOSEN},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "idefics3": {"text_config": {"pad_token_id": 0}, "vision_config": {"image_size": 364, "patch_size": 14}}
    | {"pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longt5": _START,
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}, "text_config": {"rope_parameters": _IN_SPACE}},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}, "text_config": {"rope_parameters": _IN_SPACE}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "reformer": {"axial_pos_shape": [4, 8]},
    "smolvlm": {"text_config": {"pad_token_id": 0}, "vision_config": {"image_size": 512, "patch_size": 16}}
    | {"pad_token_id": 0, "scale_factor": 4},
    "switch_transformers": _START,
    "t5": _START,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False},
}


def tiny_configuration(model_type: str, class_name: str) -> PreTrainedConfig:
    """Return the configuration of a model of this class."""
    kind = CONFIG_MAPPING[model_type]
    if model_type in _PARTS:
        return kind(**copy.deepcopy(_PARTS[model_type]))
    config = kind(**_merged(_shrunk(kind()), _SAID.get(model_type, {})))
    if model_type == "reformer":
        config.is_decoder = class_name == "ReformerModelWithLMHead"
    config.architectures = [class_name]
    return config


def _merged(fields: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return fields | {
        name: _merged(fields[name], value) if isinstance(fields.get(name), dict) and isinstance(value, dict) else value
        for name, value in said.items()
    }


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name not in _DERIVED}
    counts = {value for name, value in fields.items() if name in _LAYERS and type(value) is int and value > NUM_LAYERS}
    made = {name: _shrunk_field(name, getattr(config, name, value), counts) for name, value in fields.items()}
    return {"model_type": config.model_type, **made} if config.model_type else made


def _shrunk_field(name: str, value: Any, counts_of_layers: set[int]) -> Any:
    if isinstance(value, PreTrainedConfig):
        return _shrunk(value)
    if name in _PLACES and value is not None:
        return _PLACES[name]
    for names, most in ((_LAYERS, NUM_LAYERS), (_EXPERTS, NUM_EXPERTS), (_CHOSEN, NUM_CHOSEN)):
        if name in names and type(value) is int:
            return min(value, most)
    if isinstance(value, list) and len(value) in counts_of_layers:
        return _one_of_each(value)[:NUM_LAYERS]
    return value


def _one_of_each(values: list[Any]) -> list[Any]:
    """Put a layer of each kind first."""
    return [value for index, value in enumerate(values) if value not in values[:index]] + values
