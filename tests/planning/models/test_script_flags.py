"""The command that a plan of a denoiser ends in has the flags of diffusers' script, and the file that one names."""

import json
from pathlib import Path
from typing import Any

from denoiser_toys import SMALL, write_denoiser, write_pipeline
from transformers_toys import workload_of


def command(folder: str, output: Path, name: str, **options: Any) -> str:
    output.mkdir(exist_ok=True)
    model = workload_of(folder, **{**SMALL[name], **options}, batch_size=2, effective_batch=4, lora_rank=8)
    written = model.write({"activations": "checkpointed"}, 2, output)
    return model.command(written).partition(" train.py ")[2]


COMMON = "--train_batch_size 2 --gradient_accumulation_steps 2 --mixed_precision bf16 --max_grad_norm 1.0 --rank 8"


def test_of_scripts_that_cache_and_quantise(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "qwen image")
    found = command(
        folder, tmp_path, "qwen image", precision="bf16", dtype="bfloat16", quantize="nf4-double", text_tokens=64
    )
    file = tmp_path / "quantization.json"
    flags = f"--resolution 64 --max_sequence_length 64 --bnb_quantization_config_path {file}"
    assert found == f"{COMMON} {flags} --gradient_checkpointing --cache_latents"
    held = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    assert json.loads(file.read_text()) == held


def test_of_scripts_that_encode_in_each_step(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path, "flux")
    found = command(folder, tmp_path / "plan", "flux", precision="bf16", dtype="bfloat16", encoders="device")
    assert found == f"{COMMON} --resolution 64 --gradient_checkpointing"


def test_of_other_layers_and_shapes(tmp_path: Path) -> None:
    options = {"precision": "bf16", "dtype": "bfloat16", "lora_targets": "to_q,to_k", "image_size": "64x32"}
    found = command(write_denoiser(tmp_path, "sd3"), tmp_path, "sd3", **options)
    flags = "--lora_layers to_q,to_k --gradient_checkpointing --cache_latents"
    assert found == f"{COMMON} {flags} # and no flag for image_size=64x32: write it into train.py"


def test_of_videos(tmp_path: Path) -> None:
    found = command(write_denoiser(tmp_path, "cogvideox"), tmp_path, "cogvideox", precision="bf16", dtype="bfloat16")
    assert found == f"{COMMON} --height 64 --width 64 --max_num_frames 9 --gradient_checkpointing"


def test_what_a_script_has_no_flag_for_is_said(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "auraflow")
    options = {"precision": "bf16", "dtype": "bfloat16", "quantize": "int8-torchao", "text_tokens": 64}
    found = command(folder, tmp_path / "plan", "auraflow", **options)
    remark = "# and no flag for resolution=64, text_tokens=64, quantize=int8-torchao: write it into train.py"
    assert found == f"{COMMON} --gradient_checkpointing {remark}"
    assert not (tmp_path / "plan" / "quantization.json").exists()
