"""Small configurations of vision-language models, and the image sizes that their processors would make."""

from typing import Any

IMAGE_TOKEN = 5
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 128}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
CLIP = {"model_type": "clip_vision_model", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
LLAMA = {"model_type": "llama", **TEXT}
PLACEHOLDER, PLACEHOLDER_INDEX = {"image_token_id": IMAGE_TOKEN}, {"image_token_index": IMAGE_TOKEN}


def of_qwen(sections: list[int], **vision: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e4}
    markers = {"vision_start_token_id": 6, "vision_end_token_id": 8, "video_token_id": 7}
    tower = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, **vision}
    text = {**TEXT, "head_dim": 8, "rope_parameters": rope}
    return {**PLACEHOLDER, **markers, "text_config": text, "vision_config": tower}


PINPOINTS = [[32, 64], [64, 32], [64, 64]]
IDEFICS = {**PLACEHOLDER, "text_config": LLAMA, "vision_config": VISION, "scale_factor": 2}
INTERN = {"model_type": "internvl_vision", **VISION, "image_size": [32, 32], "patch_size": [8, 8]}
MERGED = {"out_hidden_size": 32, "intermediate_size": 64}
GEMMA = {**TEXT, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {**PLACEHOLDER_INDEX, "text_config": LLAMA, "vision_config": CLIP, "vision_feature_layer": -1},
    "llava_next": {**PLACEHOLDER_INDEX, "text_config": LLAMA, "vision_config": CLIP, "image_grid_pinpoints": PINPOINTS}
    | {"vision_feature_layer": -1},
    "paligemma": {**PLACEHOLDER_INDEX, "text_config": {"model_type": "gemma", **GEMMA}, "projection_dim": 32}
    | {"vision_config": {**SIGLIP, "projection_dim": 32}},
    "gemma3": {**PLACEHOLDER_INDEX, "vision_config": SIGLIP, "mm_tokens_per_image": 4}
    | {"text_config": {"model_type": "gemma3_text", **GEMMA, "sliding_window": 16}},
    "internvl": {**PLACEHOLDER, "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": INTERN},
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen2_vl": of_qwen([1, 1, 2], embed_dim=32),
    "qwen2_5_vl": of_qwen([1, 1, 2], **MERGED, window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": of_qwen([2, 1, 1], **MERGED, num_position_embeddings=16, deepstack_visual_indexes=[0]),
}
# Height and width; the others have images of one size.
SIZES = {"llava_next": "48x40", "internvl": "64x32", "idefics3": "64x64", "smolvlm": "64x64"}
SIZES |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "48x32")
