"""Memory of simulated denoisers, equal to that of real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import Workload
from denoiser_toys import CONFIGS, SMALL, write_denoiser
from estimate_runs import deviations, training
from transformers_toys import BATCH, built, estimate, options_of, workload_of

VARIANTS = [(rank, checkpointing) for rank in (None, 4) for checkpointing in ("none", "full")]
QUICK = {("unet of SDXL", 4, "full"), ("flux", None, "none")}


@pytest.mark.parametrize(
    ("name", "lora_rank", "checkpointing"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in ((name, *variant) for name in CONFIGS for variant in VARIANTS)
    ],
)
@pytest.mark.sweep(share=0.5)
def test_the_peaks_of_a_real_run(name: str, lora_rank: int | None, checkpointing: str, tmp_path: Path) -> None:
    options = options_of(write_denoiser(tmp_path, name), **SMALL[name], lora_rank=lora_rank, dtype="float32")

    def build() -> Workload:
        model = built(options, checkpointing, "cpu")
        batch = options.batch(options.config, BATCH)
        return Workload(model, lambda: options.kind_of_task.loss(model, batch))

    assert deviations(training(build)) == (0, 0)


def test_latents_and_embeddings_have_the_type_of_the_computation(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet")

    def dtypes(**options: Any) -> set[torch.dtype]:
        model = options_of(folder, **options)
        return {value.dtype for value in model.batch(model.config, 1).values()}

    assert dtypes() == dtypes(precision="bf16") == {torch.bfloat16}
    assert dtypes(precision="no") == dtypes(dtype="float32") == {torch.float32}
    assert dtypes(lora_rank=2) == {torch.bfloat16}
    assert dtypes(dtype="float16", precision="no") == {torch.float16}


@pytest.mark.e2e
def test_every_lever_works(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet")
    options = {"precision": "bf16", "dtype": "bfloat16", "lora_rank": 4}
    kept = estimate(folder, **options)
    assert (kept.assumptions, kept.unreached) == ((), ())
    assert estimate(folder, offload="all", **options).host_bytes > kept.host_bytes


def test_the_first_line_says_what_is_given(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet")
    assert workload_of(folder, batch_size=2).name == (
        f"{folder} as UNet2DConditionModel in float32 alone, "
        "on given latents of 64x64 images and embeddings of 77 text tokens"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flux", {}, "image_size=None: the configuration of FluxTransformer2DModel does not say"),
        ("unet", {"image_size": "72"}, "image_size=72x72: sides must be multiples of 16 for UNet2DConditionModel"),
        ("dit", {"image_size": "64x32"}, "image_size=64x32: DiTTransformer2DModel takes square images alone"),
        ("unet", {"attention": "eager"}, "attention='eager' is not simulated for task='denoising'; use auto or sdpa"),
        ("unet", {"loss": "chunked"}, "loss='chunked' is .* use "),
        (
            "unet",
            {"lora_rank": 2, "quantize": "nf4-experts"},
            "quantize='nf4-experts' is not simulated .*; use none or nf4",
        ),
        (
            "unet",
            {"text_tokens": 32},
            "text_tokens=32: text tokens of UNet2DConditionModel are always 77; leave it out",
        ),
        ("dit", {"text_tokens": 32}, "text_tokens=32: text tokens of DiTTransformer2DModel are none; leave it out"),
        ("unet", {"num_frames": 9}, "num_frames=9: UNet2DConditionModel learns images; leave it out"),
        (
            "wan",
            {"image_size": "64"},
            "num_frames=None: .* does not say how long videos are; give num_frames, .* such as 41",
        ),
        ("wan", {"image_size": "64", "num_frames": 12}, "num_frames=12: .* takes a multiple of 4 and one more; use 9"),
        ("sana", {"image_size": "48"}, "image_size=48x48: sides must be multiples of 32 for SanaTransformer2DModel"),
        ("sd3", {"encoders": "both"}, "encoders='both' is unknown; choose from off, vae, device"),
        ("unet", {"num_gpus": 2, "engine": "fsdp2"}, "engine='fsdp2' is not simulated for task='denoising'; use ddp"),
        ("unet", {"padding": True}, "padding=True: batches of task='denoising' have no attention mask"),
        ("unet", {"images_per_sample": 2}, "images_per_sample=2 means nothing to task='denoising'"),
        ("unet", {"task": "causal"}, "no class of model_type='UNet2DConditionModel' for task='causal'"),
    ],
)
def test_what_a_denoiser_cannot_be_trained_with_is_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(write_denoiser(tmp_path, name), **options)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wan", {"in_channels": 12}, "takes 12 channels and makes 4: models of images beside text are not simulated"),
        ("unet", {"in_channels": 9}, "this UNet2DConditionModel takes 9 channels and makes 4"),
        ("cogvideox", {"patch_size_t": 2}, "has patch_size_t=2: .* trains those of CogVideoX 1.0"),
    ],
)
def test_models_of_other_inputs_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=message):
        options_of(folder, **SMALL[name])


def described(options: Any) -> str:
    text: str = options.kind_of_task.describe(options.config, options.sample)
    return text


def test_a_run_may_have_another_number_of_text_tokens(tmp_path: Path) -> None:
    def text(name: str, **options: Any) -> tuple[str, int]:
        model = options_of(write_denoiser(tmp_path, name), **SMALL[name], **options)
        return described(model).rpartition(" and ")[2], model.batch(model.config, 1)["encoder_hidden_states"].shape[1]

    assert text("flux") == ("embeddings of 512 text tokens", 512)
    assert text("flux", text_tokens=77) == ("embeddings of 77 text tokens", 77)
    assert text("sd3", text_tokens=100) == ("embeddings of 177 text tokens", 177)


def test_videos_have_the_configurations_size_or_the_runs(tmp_path: Path) -> None:
    def video(**options: Any) -> tuple[str, torch.Size]:
        model = options_of(write_denoiser(tmp_path, "cogvideox"), **options)
        return described(model).partition("latents of ")[2], model.batch(model.config, 2)["latents"].shape

    assert video() == ("64x64 videos of 9 frames and embeddings of 226 text tokens", (2, 4, 3, 8, 8))
    changed = video(image_size="32x48", num_frames=5)
    assert changed == ("32x48 videos of 5 frames and embeddings of 226 text tokens", (2, 4, 2, 4, 6))


def test_other_classes_are_refused(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet", _class_name="UNet2DModel")
    with pytest.raises(ValueError, match=r"UNet2DModel takes beside latents is not known, .*; write setup and step"):
        options_of(folder)
