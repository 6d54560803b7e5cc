from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

fluxflow_model = LateModule("hf_memopt.recipes.fluxflow.model")
options = LateModule("hf_memopt.recipes.fluxflow.options")


@pytest.fixture
def empty_hub(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def vgg() -> Any:
    before = torch.random.get_rng_state()
    made = fluxflow_model.PerceptualLoss("random", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    return made


def test_imagenets_weights_are_not_downloaded(empty_hub: None) -> None:
    with pytest.raises(ValueError, match=r"lpips_weights='imagenet': there is no .*vgg16-397923af.pth"):
        fluxflow_model.make_perceptual(options.LossOptions(lpips_weights="imagenet"))


def test_without_them_it_measures_load_and_says_so(empty_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("hf_memopt.recipes.fluxflow.model.PerceptualLoss", lambda weights, seed: asked.append(weights))
    fluxflow_model.make_perceptual(options.LossOptions())
    file = fluxflow_model.Path(torch.hub.get_dir()) / "checkpoints" / fluxflow_model.VGG_FILE
    file.parent.mkdir(parents=True)
    file.touch()
    fluxflow_model.make_perceptual(options.LossOptions())
    assert asked == ["random", "imagenet"]


def test_lpips_is_frozen_and_random_weights_are_named_so(vgg: Any) -> None:
    assert vgg.name == "lpips_load_only"
    assert "LOAD ONLY" in vgg.description
    assert not any(p.requires_grad for p in vgg.parameters())
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert vgg(images, images).abs().max() == 0
    assert vgg(images, -images).min() > 0


@pytest.mark.parametrize(("resolution", "held_mib"), [(64, 10), (128, 38), (256, 152), (512, 610), (1024, 2439)])
def test_lpips_holds_what_the_table_says(vgg: Any, resolution: int, held_mib: int) -> None:
    """Compare the bytes saved for backward, to 3 % and the table's rounding, without allocating them."""
    found = held_bytes(vgg, resolution) / 2**20
    assert found == pytest.approx(held_mib, rel=0.03, abs=0.5)


def held_bytes(perceptual: Any, resolution: int) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    storages: dict[int, torch.UntypedStorage] = {}
    weights = {id(p.untyped_storage()) for p in perceptual.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights:
            storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        image = torch.empty(1, 3, resolution, resolution, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            perceptual(image, torch.empty_like(image, requires_grad=False))
    return sum(storage.nbytes() for storage in storages.values())
