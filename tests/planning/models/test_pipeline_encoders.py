"""The VAE and text encoders of a pipeline, beside a denoiser that trains."""

import shutil
from collections.abc import Callable
from pathlib import Path

import denoiser_toys
import pytest
import torch
from architectures import Workload
from denoiser_toys import write_denoiser, write_pipeline
from estimate_runs import deviations, training
from late_imports import LateModule
from transformers_toys import built, options_of, workload_of

pipelines = LateModule("hf_memopt.planning.models.pipelines")

SMALL = {"image_size": "64", "text_tokens": 8}


@pytest.mark.parametrize(("name", "encoders"), [("flux", "vae"), ("flux", "device"), ("wan", "vae")])
@pytest.mark.sweep(share=0.3)
def test_the_peaks_of_a_real_run_that_encodes(name: str, encoders: str, tmp_path: Path) -> None:
    settings = {**denoiser_toys.SMALL[name], "text_tokens": 8, "encoders": encoders, "lora_rank": 4}
    options = options_of(write_pipeline(tmp_path, name), **settings)

    def build() -> Workload:
        beside = pipelines.PipelineEncoders(options.encoder_configs, options.config, 2, options.sample)
        model = built(options, "full", "cpu")
        batch = options.batch(options.config, 2)

        def loss() -> torch.Tensor:
            beside.run()
            return options.kind_of_task.loss(model, batch)

        return Workload(model, loss)

    assert deviations(training(build)) == (0, 0)


def test_encoders_are_frozen_and_in_the_types_of_the_scripts(tmp_path: Path) -> None:
    def dtypes(name: str) -> list[torch.dtype]:
        folder = write_pipeline(tmp_path / name, name)
        options = options_of(folder, **SMALL, encoders="device", dtype="bfloat16")
        beside = pipelines.PipelineEncoders(options.encoder_configs, options.config, 1, options.sample)
        models = [beside._vae, *beside._texts]
        assert not any(parameter.requires_grad for model in models for parameter in model.parameters())
        return [model.dtype for model in models]

    assert dtypes("flux") == [torch.bfloat16] * 3
    assert dtypes("sd3") == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_clip_has_its_own_number_of_tokens(tmp_path: Path) -> None:
    options = options_of(write_pipeline(tmp_path, "flux"), **SMALL, encoders="device")
    beside = pipelines.PipelineEncoders(options.encoder_configs, options.config, 3, options.sample)
    assert [tuple(tokens.shape) for tokens in beside._tokens] == [(3, 77), (3, 8)]


def test_the_first_line_says_where_they_are(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path, "flux")
    name = f"{folder} as FluxTransformer2DModel in float32"
    assert workload_of(folder, **SMALL, batch_size=1, encoders="vae").name == (
        f"{name} beside its VAE, on 64x64 images and embeddings of 8 text tokens"
    )
    assert workload_of(folder, **SMALL, batch_size=1, encoders="device").name == (
        f"{name} beside its VAE and text encoders, on 64x64 images and 8 text tokens"
    )


def _of_denoiser_alone(folder: Path) -> str:
    return write_denoiser(folder, "flux")


def _without_a_part(folder: Path) -> str:
    pipeline = write_pipeline(folder, "flux")
    shutil.rmtree(folder / "text_encoder_2")
    return pipeline


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            _of_denoiser_alone,
            "encoders='device': .* has no model_index.json that names a VAE; give the folder or hub id",
        ),
        (_without_a_part, "encoders='device': .* has no text_encoder_2/config.json; add it to the pipeline's folder"),
    ],
)
def test_a_folder_without_them_is_refused(write: Callable[[Path], str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(write(tmp_path), **SMALL, encoders="device")
