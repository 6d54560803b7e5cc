"""Small configurations of diffusers' denoisers."""

import json
from pathlib import Path
from typing import Any

UNET: dict[str, Any] = {"_class_name": "UNet2DConditionModel", "block_out_channels": [16, 32], "layers_per_block": 1}
UNET |= {"norm_num_groups": 8, "sample_size": 8, "cross_attention_dim": 16, "attention_head_dim": 4}
UNET |= {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"]}
UNET |= {"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"]}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
PATCHES = {**HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 8, "patch_size": 2}
JOINT = {**HEADS, "joint_attention_dim": 16, "pooled_projection_dim": 24}
ADDED = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80}
CONFIGS: dict[str, dict[str, Any]] = {
    "unet": UNET,
    "unet of SDXL": {**UNET, **ADDED, "use_linear_projection": True},
    "sd3": {"_class_name": "SD3Transformer2DModel", **PATCHES, **JOINT, "out_channels": 4, "pos_embed_max_size": 16}
    | {"caption_projection_dim": 32},
    "flux": {"_class_name": "FluxTransformer2DModel", **JOINT, "attention_head_dim": 16, "in_channels": 16}
    | {"num_single_layers": 2, "guidance_embeds": True, "axes_dims_rope": [4, 4, 8]},
    "pixart": {"_class_name": "PixArtTransformer2DModel", **PATCHES, "cross_attention_dim": 32, "caption_channels": 16},
    "dit": {"_class_name": "DiTTransformer2DModel", **PATCHES, "num_embeds_ada_norm": 10},
    "flux2": {"_class_name": "Flux2Transformer2DModel", **HEADS, "num_single_layers": 2, "in_channels": 16}
    | {"joint_attention_dim": 16, "axes_dims_rope": [2, 2, 2, 2], "timestep_guidance_channels": 16},
    "qwen image": {"_class_name": "QwenImageTransformer2DModel", **HEADS, "attention_head_dim": 16, "in_channels": 16}
    | {"out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": [4, 4, 8]},
    "z-image": {"_class_name": "ZImageTransformer2DModel", "in_channels": 4, "dim": 64, "n_layers": 2, "n_heads": 4}
    | {"n_kv_heads": 4, "n_refiner_layers": 1, "cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [600, 16, 16]},
    "lumina2": {"_class_name": "Lumina2Transformer2DModel", "sample_size": 8, "in_channels": 4, "hidden_size": 32}
    | {"num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8}
    | {"axes_dim_rope": [4, 2, 2], "axes_lens": [300, 16, 16], "cap_feat_dim": 16},
    "sana": {"_class_name": "SanaTransformer2DModel", **HEADS, "sample_size": 2, "in_channels": 4, "out_channels": 4}
    | {
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 32,
        "caption_channels": 16,
    },
    "auraflow": {"_class_name": "AuraFlowTransformer2DModel", "sample_size": 8, "num_mmdit_layers": 1}
    | {"num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 16}
    | {"caption_projection_dim": 32, "pos_embed_max_size": 16},
    "hidream": {"_class_name": "HiDreamImageTransformer2DModel", **HEADS, "num_layers": 1, "num_single_layers": 1}
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "caption_channels": [16, 16], "text_emb_dim": 24}
    | {"axes_dims_rope": [4, 2, 2], "max_resolution": [16, 16], "llama_layers": [0, 1], "num_routed_experts": 2}
    | {"force_inference_output": True},
    "wan": {"_class_name": "WanTransformer3DModel", **HEADS, "attention_head_dim": 12, "in_channels": 4}
    | {"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 64},
    "ltx": {"_class_name": "LTXVideoTransformer3DModel", **HEADS, "in_channels": 8, "out_channels": 8}
    | {"cross_attention_dim": 32, "caption_channels": 16},
    "cogvideox": {"_class_name": "CogVideoXTransformer3DModel", **HEADS, "attention_head_dim": 16, "in_channels": 4}
    | {"out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8, "sample_height": 8}
    | {"sample_frames": 9, "use_rotary_positional_embeddings": True},
}
# Options that make a sample small.
SMALL: dict[str, dict[str, Any]] = {name: {"image_size": "64"} for name in CONFIGS}
SMALL |= {name: {"image_size": "64", "num_frames": 9} for name in ("wan", "ltx", "cogvideox")}


def write_denoiser(folder: Path, name: str, **changes: Any) -> str:
    """Write a changed configuration, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return str(folder)


VAE: dict[str, Any] = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 16, 16, 16], "norm_num_groups": 4}
VAE |= {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
CLIP: dict[str, Any] = {"model_type": "clip_text_model", "vocab_size": 64, "max_position_embeddings": 77}
CLIP |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
T5: dict[str, Any] = {"model_type": "t5", "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
T5 |= {"num_heads": 2, "is_encoder_decoder": True, "feed_forward_proj": "gated-gelu"}
VAE_OF_VIDEOS: dict[str, Any] = {"_class_name": "AutoencoderKLWan", "base_dim": 8, "z_dim": 4, "num_res_blocks": 1}
ENCODERS = {
    "text_encoder": (CLIP, ["transformers", "CLIPTextModel"]),
    "text_encoder_2": (T5, ["transformers", "T5EncoderModel"]),
}


def write_pipeline(folder: Path, name: str) -> str:
    """Write the configurations of a pipeline with a VAE, CLIP and T5, and return its folder."""
    write_denoiser(folder / "transformer", name)
    vae = VAE_OF_VIDEOS if "num_frames" in SMALL[name] else VAE
    encoders = {"vae": (vae, ["diffusers", vae["_class_name"]]), **ENCODERS}
    for part, (config, _) in encoders.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    index = {part: named for part, (_, named) in encoders.items()}
    index |= {"transformer": ["diffusers", CONFIGS[name]["_class_name"]], "text_encoder_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)
