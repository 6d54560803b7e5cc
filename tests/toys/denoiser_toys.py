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
}


def write_denoiser(folder: Path, name: str, **changes: Any) -> str:
    """Write a changed configuration, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return str(folder)
