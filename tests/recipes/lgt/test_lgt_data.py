import math
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from lgt_toys import tiny
from safetensors.torch import save_file
from torch import Tensor

from hf_memopt.recipes.lgt import data as lgt_data
from hf_memopt.recipes.lgt.data import LatentBank, Latents
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.recipes.lgt.step import self_similarity_difference, sliced_wasserstein

datasets = LateModule("datasets")

CPU = torch.device("cpu")


def bank_of(config_values: dict[str, object], num_per_style: int = 6) -> LatentBank:
    """A bank in which all values of a latent of style s are s."""
    styles = torch.arange(2).repeat(num_per_style)
    latents = styles.view(-1, 1, 1, 1).float().expand(-1, 4, 8, 8)
    return LatentBank(Latents(latents, styles), tiny(**config_values), CPU)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return sliced_wasserstein(ours, theirs, num_projections=32, max_samples=8192).item()


def test_the_styles_differ_and_contents_can_be_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    contents = lgt_data.make_contents(32, 16, 4, generator)
    assert contents.mean(dim=(2, 3)).abs().max() < 1e-5
    first, second = (lgt_data.in_style(contents, torch.full((32,), style), generator) for style in (0, 1))
    others = lgt_data.in_style(
        lgt_data.make_contents(32, 16, 4, generator), torch.ones(32, dtype=torch.long), generator
    )
    assert distance(first, others) > 3 * distance(second, others)
    truth = self_similarity_difference(first, second)
    assert truth < 0.6 * self_similarity_difference(first, others)


def test_generated_latents_are_the_same_for_a_seed_and_split_within_styles() -> None:
    train, held_out = lgt_data.load(tiny())
    again, _ = lgt_data.load(tiny())
    other, _ = lgt_data.load(tiny(data__data_seed=1))
    assert torch.equal(train.latents, again.latents)
    assert not torch.equal(train.latents, other.latents)
    assert held_out.styles.bincount().tolist() == [2, 2]
    assert train.styles.bincount().tolist() == [18, 18]
    assert not (train.latents[:, None] == held_out.latents).all(dim=(2, 3, 4)).any()


def write_styles(folder: Path, photo: object, monet: object) -> Options:
    for name, held in (("photo", photo), ("monet", monet)):
        (folder / name).mkdir()
        torch.save(held, folder / name / "a.pt")
    return tiny(data__data_root=str(folder), data__style_subdirs=["photo", "monet"])


def test_latents_with_a_gradient_are_read_without(tmp_path: Path) -> None:
    encoder = torch.ones(4, 4, 8, 8, requires_grad=True)
    found = lgt_data.load(write_styles(tmp_path, encoder * 2, [encoder[0], encoder[1]]))
    assert not any(latents.requires_grad for part in found for latents in part)
    assert [len(part.styles) for part in found] == [4, 2]


GOOD = torch.ones(4, 4, 8, 8)


class Code:
    def __reduce__(self) -> Any:
        return breakpoint, ()


@pytest.mark.parametrize(
    ("photo", "said"),
    [
        ([GOOD, torch.ones(4, 4, 16, 16)], r"photo/a.pt has latents of \(4, 16, 16\), .*a.pt of \(4, 8, 8\); encode"),
        (torch.ones(4, 4, 16, 16), r"monet/a.pt has latents of \(4, 8, 8\), .*photo/a.pt of \(4, 16, 16\); encode"),
        ({"latent": GOOD, "label": 3}, r"photo/a.pt holds 'label', int; each entry must be latents"),
        (
            {"latent": GOOD, "label": torch.tensor([3])},
            r"holds 'label', torch.int64, \(1,\); each entry must",
        ),
        ("photo", r"photo/a.pt holds str; each entry must be latents"),
        (Code(), r"photo/a.pt cannot be read \(UnpicklingError: Weights only load failed\); store plain numbers"),
    ],
)
def test_files_of_something_else_are_named(photo: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        lgt_data.load(write_styles(tmp_path, photo, GOOD))


def test_a_folder_of_latents(tmp_path: Path) -> None:
    for name, value in (("photo", 1.0), ("monet", 2.0)):
        (tmp_path / name).mkdir()
        torch.save(torch.full((4, 8, 8), value), tmp_path / name / "a.pt")
        torch.save(torch.full((1, 4, 8, 8), value), tmp_path / name / "b.pt")
        save_file({"latents": torch.full((2, 4, 8, 8), value)}, tmp_path / name / "c.safetensors")
    values = {"data__data_root": str(tmp_path), "data__style_subdirs": ["monet", "photo"], "data__held_out": 0.25}
    train, held_out = lgt_data.load(tiny(**values))
    assert train.latents[:, 0, 0, 0].tolist() == [2.0] * 3 + [1.0] * 3
    assert train.styles.tolist() == [0] * 3 + [1] * 3
    assert len(held_out.styles) == 2
    with pytest.raises(ValueError, match=r"no .pt or .safetensors files in .*style0"):
        lgt_data.load(tiny(data__data_root=str(tmp_path)))
    with pytest.raises(ValueError, match=r"latents are \(4, 8, 8\); they must be"):
        lgt_data.load(tiny(**values, model__latent_channels=3))


def test_a_dataset_of_latents(tmp_path: Path) -> None:
    rows = {"z": torch.arange(6.0).view(6, 1, 1, 1).expand(6, 4, 8, 8).tolist(), "label": [0, 1, 0, 1, 0, 1]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "latents")
    columns = {"data__latent_column": "z", "data__style_column": "label"}
    train, held_out = lgt_data.load(tiny(data__dataset=str(tmp_path / "latents"), **columns))
    found = torch.cat([train.latents, held_out.latents])[:, 0, 0, 0]
    assert sorted(found.tolist()) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(torch.cat([train.styles, held_out.styles]), found.long() % 2)
    with pytest.raises(ValueError, match=r"num_styles=3: the data have \[3, 3, 0\] latents of styles"):
        lgt_data.load(tiny(data__dataset=str(tmp_path / "latents"), model__num_styles=3, **columns))


def test_a_saved_dataset_without_the_split_is_refused(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"latent": [[0.0]], "style": [0]})
    datasets.DatasetDict({"first": rows, "second": rows}).save_to_disk(tmp_path / "latents")
    with pytest.raises(ValueError, match=r"data.dataset=.* cannot be loaded: split='train': it has first, second"):
        lgt_data.load(tiny(data__dataset=str(tmp_path / "latents")))
    with pytest.raises(ValueError, match=r"data.dataset='pandas' cannot be loaded: a loader of the datasets library"):
        lgt_data.load(tiny(data__dataset="pandas"))


def test_data_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        lgt_data.load(tiny(data__dataset="x", data__data_root="y"))
    with pytest.raises(ValueError, match="generated latents have two styles"):
        lgt_data.load(tiny(model__num_styles=3))


def test_target_latents_have_the_target_style() -> None:
    torch.manual_seed(0)
    for assignment in ("one_per_batch", "permuted"):
        bank = bank_of({"training__target_styles": assignment})
        for step in range(8):
            (batch,) = bank.micro_batches([torch.tensor([0, 1, 5, 7, 8])], step, 0.01)
            assert torch.equal(batch["target_latents"][:, 0, 0, 0], batch["targets"].float())


def test_a_batch_has_one_target_style_that_its_number_decides() -> None:
    torch.manual_seed(0)
    bank, rows = bank_of({"loss__style_weights": [3.0, 5.0]}), [torch.arange(8), torch.arange(4, 12)]
    targets = []
    for step in range(40):
        batches = bank.micro_batches(rows, step, 0.01)
        again = bank.micro_batches(rows, step, 0.01)
        for batch, same in zip(batches, again, strict=True):
            assert len(set(batch["targets"].tolist())) == 1
            assert torch.equal(batch["targets"], same["targets"])
            assert not torch.equal(batch["start"], same["start"])
            assert torch.equal(batch["style_weights"], 3 + 2 * batch["targets"].float())
            targets.append(batch["targets"][0].item())
    assert 25 < sum(targets) < 55


@pytest.mark.parametrize("num_styles", [2, 3])
def test_contents_of_others_never_have_the_target_style(num_styles: int) -> None:
    torch.manual_seed(0)
    styles = torch.arange(num_styles).repeat(6)
    latents = styles.view(-1, 1, 1, 1).float().expand(-1, 4, 8, 8)
    config = tiny(training__target_styles="others", model__num_styles=num_styles)
    bank = LatentBank(Latents(latents, styles), config, CPU)
    seen = set()
    for step in range(30):
        (batch,) = bank.micro_batches([torch.arange(6 * num_styles)], step, 0.01)
        (target,) = set(batch["targets"].tolist())
        contents = set(batch["latents"][:, 0, 0, 0].tolist())
        assert contents == set(range(num_styles)) - {target}
        seen.add(target)
    assert seen == set(range(num_styles))


def test_permuted_targets_are_the_batchs_own() -> None:
    torch.manual_seed(0)
    bank = bank_of({"training__target_styles": "permuted"})
    rows = torch.tensor([0, 1, 2, 6, 7, 8, 9, 10])
    for step in range(5):
        (batch,) = bank.micro_batches([rows], step, 0.01)
        assert batch["targets"].bincount().tolist() == [3, 5]


def test_with_permuted_targets_untouched_contents_are_as_good_as_any() -> None:
    """Check the reason for the choice "one_per_batch": permuted targets have the contents' styles."""
    torch.manual_seed(0)
    train, _ = lgt_data.load(tiny(data__num_generated=64, data__latent_size=16))
    rows = [torch.arange(len(train.styles))]
    found = {}
    for assignment in ("permuted", "one_per_batch"):
        config = tiny(training__target_styles=assignment)
        (batch,) = LatentBank(train, config, CPU).micro_batches(rows, 0, 0.01)
        found[assignment] = distance(batch["latents"], batch["target_latents"])
    assert found["one_per_batch"] > 3 * found["permuted"]


def test_micro_batches_of_gradient_cache_share_target_and_drop() -> None:
    torch.manual_seed(0)
    bank = bank_of({"training__gradient_cache": True, "training__batch_size": 4, "training__label_drop_prob": 0.5})
    drops = []
    for step in range(20):
        batches = bank.micro_batches([torch.arange(4), torch.arange(4, 8), torch.arange(8, 11)], step, 0.01)
        assert [len(batch["time"]) for batch in batches] == [4, 4, 3]
        assert len({value for batch in batches for value in batch["targets"].tolist()}) == 1
        assert len({value for batch in batches for value in batch["dropped"].tolist()}) == 1
        drops.append(batches[0]["dropped"][0].item())
    assert 4 < sum(drops) < 16


def test_starts_lie_between_noise_and_content_from_epsilon_on() -> None:
    torch.manual_seed(0)
    bank = LatentBank(Latents(torch.full((40, 4, 8, 8), 5.0), torch.arange(40) % 2), tiny(), CPU)
    (batch,) = bank.micro_batches([torch.arange(40).repeat(10)], 0, 0.4)
    time = batch["time"]
    assert time.min() > 0.4
    assert time.max() > 0.98
    noise = (batch["start"] - 5 * time.view(-1, 1, 1, 1)) / (1 - time.view(-1, 1, 1, 1))
    assert noise[time < 0.9].std() == pytest.approx(1, rel=0.01)
    assert math.isclose(noise[time < 0.9].mean().item(), 0, abs_tol=0.01)


def test_starts_end_at_the_latest_time() -> None:
    torch.manual_seed(0)
    config = tiny(training__epsilon=0.5, training__latest_time=0.75)
    bank = LatentBank(Latents(torch.zeros(40, 4, 8, 8), torch.arange(40) % 2), config, CPU)
    (batch,) = bank.micro_batches([torch.arange(40).repeat(10)], 0, 0.5)
    assert 0.5 <= batch["time"].min() < 0.51
    assert 0.74 < batch["time"].max() <= 0.75
    with pytest.raises(ValueError, match=r"training.epsilon=0.8 must not be above training.latest_time=0.75"):
        tiny(training__epsilon=0.8, training__latest_time=0.75)
