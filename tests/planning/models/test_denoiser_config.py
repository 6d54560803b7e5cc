"""Configurations of denoisers are found where diffusers keeps them."""

import json
import sys
from pathlib import Path

import pytest
from denoiser_toys import write_denoiser
from late_imports import LateModule

from hf_memopt.planning.models.pipelines import find_denoiser

model_config = LateModule("hf_memopt.planning.models.model_config")
torch = LateModule("torch")


def test_files_folders_and_pipelines_will_do(tmp_path: Path) -> None:
    alone = write_denoiser(tmp_path / "alone", "unet")
    write_denoiser(tmp_path / "pipeline" / "transformer", "flux")
    for model, name in (
        (alone, "UNet2DConditionModel"),
        (f"{alone}/config.json", "UNet2DConditionModel"),
        (str(tmp_path / "pipeline"), "FluxTransformer2DModel"),
    ):
        assert model_config.read_config(model).class_name == name
    assert find_denoiser(str(tmp_path)) is None


def test_pipelines_on_the_hub_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a pipeline that was downloaded before, from the hub's own folders."""
    commit = "0" * 40
    snapshot = tmp_path / "models--of--somebody" / "snapshots" / commit
    write_denoiser(snapshot / "unet", "unet")
    (snapshot / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_config.read_config("of/somebody").class_name == "UNet2DConditionModel"
    assert find_denoiser("of/nobody") is None


def test_what_the_file_leaves_out_is_the_classs_default(tmp_path: Path) -> None:
    config = model_config.read_config(write_denoiser(tmp_path, "unet"))
    assert (config.in_channels, config.sample_size) == (4, 8)
    with pytest.raises(AttributeError, match="colour"):
        _ = config.colour
    model = config.build("it", torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "UNet9D"}, "diffusers has no class 'UNet9D'; update it"),
        ({"block_out_channels": [16]}, r"diffusers cannot build a model .* \(ValueError"),
    ],
)
def test_what_diffusers_cannot_make_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = write_denoiser(tmp_path, "unet", **changes)
    with pytest.raises(ValueError, match=message):
        model_config.read_config(folder).build(f"model={folder!r}", torch.float32)


def test_without_diffusers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        ValueError, match=r"is of diffusers, which is not installed: pip install 'hf_memopt\[diffusers\]'"
    ):
        model_config.read_config(write_denoiser(tmp_path, "unet"))
