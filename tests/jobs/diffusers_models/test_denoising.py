"""Memory of simulated denoisers, equal to that of real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import Workload
from denoiser_toys import CONFIGS, write_denoiser
from estimate_runs import deviations, training
from late_imports import LateModule
from transformers_toys import BATCH, estimate

huggingface = LateModule("hf_memopt.jobs.huggingface")
model_building = LateModule("hf_memopt.jobs.transformers_models.model_building")

IMAGES = {"image_size": "64"}
VARIANTS = [(rank, checkpointing) for rank in (None, 4) for checkpointing in ("none", "full")]
QUICK = {("unet of SDXL", 4, "full"), ("flux", None, "none")}


@pytest.mark.parametrize(
    ("name", "lora_rank", "checkpointing"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in ((name, *variant) for name in CONFIGS for variant in VARIANTS)
    ],
)
def test_the_peaks_of_a_real_run(name: str, lora_rank: int | None, checkpointing: str, tmp_path: Path) -> None:
    options = huggingface.HuggingFaceModel(write_denoiser(tmp_path, name), **IMAGES, lora_rank=lora_rank)

    def build() -> Workload:
        model = model_building.build_model(options, options.config, checkpointing)
        batch = options.batch(options.config, BATCH)
        return Workload(model, lambda: options.kind_of_task.loss(model, batch))

    assert deviations(training(build)) == (0, 0)


def test_latents_and_embeddings_have_the_type_of_the_computation(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet")

    def dtypes(**options: Any) -> set[torch.dtype]:
        model = huggingface.HuggingFaceModel(folder, **options)
        return {value.dtype for value in model.batch(model.config, 1).values()}

    assert dtypes() == {torch.float32}
    assert dtypes(precision="bf16") == {torch.bfloat16}
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
    assert huggingface.HuggingFaceModel(folder).name == (
        f"{folder} as UNet2DConditionModel alone, on given latents of 64x64 images and embeddings of 77 text tokens"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flux", {}, "image_size=None: the configuration of FluxTransformer2DModel does not say"),
        ("unet", {"image_size": "72"}, "image_size=72x72: sides must be multiples of 16 for UNet2DConditionModel"),
        ("dit", {"image_size": "64x32"}, "image_size=64x32: DiTTransformer2DModel takes square images alone"),
        ("unet", {"attention": "eager"}, "attention='eager' is not simulated for task='denoising'; use auto or sdpa"),
        ("unet", {"loss": "chunked"}, "loss='chunked' is .* use "),
        ("unet", {"lora_rank": 2, "quantize": "nf4"}, "quantize='nf4' is not simulated for task='denoising'; use none"),
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
        huggingface.HuggingFaceModel(write_denoiser(tmp_path, name), **options)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet", _class_name="UNet2DModel")
    with pytest.raises(ValueError, match=r"UNet2DModel takes beside latents is not known, .*; write setup and step"):
        huggingface.HuggingFaceModel(folder)
