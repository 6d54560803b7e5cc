"""Couplings from disk are those of the teacher, bit for bit; whatever else a folder holds is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
datasets = LateModule("datasets")
key = LateModule("hf_memopt.lerobot.couplings.key")
couplings_source = LateModule("hf_memopt.lerobot.couplings.source")


# ------------------------------------------------------------------------------------------------ the same couplings


@pytest.mark.parametrize("world_size", [1, 2])
def test_cached_is_online_bit_for_bit_on_every_rank(folder: Path, world_size: int) -> None:
    spec, state = coupling_toys.make_spec(), torch.get_rng_state()
    for rank in range(world_size):
        online = couplings_source.CouplingSource.online(
            coupling_toys.Teacher(), coupling_toys.load, spec, rank=rank, world_size=world_size
        )
        cached = couplings_source.CouplingSource.cached(
            folder, coupling_toys.load, expected=spec.key, rank=rank, world_size=world_size
        )
        coupling_toys.assert_same(online, cached, num_epochs=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_takes_each_sample_once_and_epochs_differ() -> None:
    source = couplings_source.CouplingSource.online(
        coupling_toys.Teacher(), coupling_toys.load, coupling_toys.make_spec(num_draws=2)
    )
    seen = []
    for epoch in range(3):
        source.set_epoch(epoch)
        seen.append({index: c.noise[row] for c in source for row, index in enumerate(c.indices)})
    assert all(sorted(epoch) == sorted(coupling_toys.make_spec().indices) for epoch in seen)
    assert list(seen[0]) != list(seen[1])
    index = coupling_toys.make_spec().indices[0]
    assert torch.equal(seen[0][index], seen[2][index])  # two draws, so the third epoch repeats the first's
    assert not torch.equal(seen[0][index], seen[1][index])


def test_ranks_take_different_samples_and_as_many() -> None:
    spec = coupling_toys.make_spec(batch_size=2)
    ranks = [
        couplings_source.CouplingSource.online(
            coupling_toys.Teacher(), coupling_toys.load, spec, rank=rank, world_size=3
        )
        for rank in range(3)
    ]
    assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks] == [4, 4, 4]
    taken = [index for rank in ranks for coupling in rank for index in coupling.indices]
    assert len(set(taken)) == len(taken) == coupling_toys.NUM_SAMPLES


def test_the_folder_is_a_dataset_of_the_datasets_library(folder: Path) -> None:
    rows = datasets.load_from_disk(str(folder))
    assert rows.num_rows == 2 * coupling_toys.NUM_SAMPLES
    assert rows[0]["noise_seed"] == key.noise_seed(7, rows[0]["index"], 0)
    assert len(rows[0]["target"]) == 6
    assert len(rows.cache_files) == 6


def test_training_on_cached_couplings_is_training_online(folder: Path) -> None:
    weights = []
    for source in (
        couplings_source.CouplingSource.online(coupling_toys.Teacher(), coupling_toys.load, coupling_toys.make_spec()),
        couplings_source.CouplingSource.cached(folder, coupling_toys.load),
    ):
        torch.manual_seed(1)
        student = torch.nn.Linear(6, 6)
        optimizer = torch.optim.Adam(student.parameters())
        for coupling in source:
            time_ = torch.rand(len(coupling.noise), 1)
            x = time_ * coupling.noise.flatten(1) + (1 - time_) * coupling.target.flatten(1)
            (student(x) - (coupling.noise - coupling.target).flatten(1)).square().mean().backward()
            optimizer.step()
        weights.append(student.weight.detach())
    assert torch.equal(*weights)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "0" * 64),
        ("solver", "heun"),
        ("num_steps", 5),
        ("dtype", "bfloat16"),
        ("seed", 8),
        ("dataset", "letters"),
        ("preprocessing", "whitened"),
    ],
)
def test_each_stale_field_is_refused_by_name(folder: Path, field: str, value: Any) -> None:
    stale = coupling_toys.make_spec(**{field: value})
    with pytest.raises(ValueError, match=rf"not the ones asked for: {field} is .* there and .* here\. "):
        couplings_source.CouplingSource.cached(folder, coupling_toys.load, expected=stale.key)
    with pytest.raises(ValueError, match=rf"not the ones asked for: {field} is"):
        couplings_source.precompute(coupling_toys.Teacher(), coupling_toys.load, stale, folder, shard_size=8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_draws": 3}, "num_draws"), ({"batch_size": 2}, "batch_size"), ({"num_samples": 22}, "num_samples")],
)
def test_a_folder_is_completed_with_its_own_plan_only(folder: Path, changes: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        couplings_source.precompute(
            coupling_toys.Teacher(), coupling_toys.load, coupling_toys.make_spec(**changes), folder, shard_size=8
        )


def test_every_truncation_and_every_flipped_byte_is_found(own: Path) -> None:
    file = own / "data-00003-of-00006.arrow"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[:100], b"", bytes(flipped), whole + b"\0"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"data-00003-of-00006\.arrow is truncated or damaged"):
            couplings_source.CouplingSource.cached(own, coupling_toys.load)
    file.write_bytes(whole)
    couplings_source.CouplingSource.cached(own, coupling_toys.load)


def test_an_unfinished_cache_is_refused_and_repaired_by_the_same_command(own: Path) -> None:
    (own / "data-00002-of-00006.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00002-of-00006\.arrow is missing"):
        couplings_source.CouplingSource.cached(own, coupling_toys.load)
    before = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert coupling_toys.write(own) == []
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
    coupling_toys.assert_same(
        couplings_source.CouplingSource.online(coupling_toys.Teacher(), coupling_toys.load, coupling_toys.make_spec()),
        couplings_source.CouplingSource.cached(own, coupling_toys.load),
        2,
    )


def test_folders_without_couplings_are_refused(tmp_path: Path, own: Path) -> None:
    with pytest.raises(ValueError, match="holds no couplings"):
        couplings_source.CouplingCache(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex"):
        coupling_toys.write(tmp_path / "other")
    (own / "couplings.json").write_text("{")
    with pytest.raises(ValueError, match=r"couplings.json is damaged"):
        couplings_source.CouplingCache(own)


# ------------------------------------------------------------------------------------------------ augmentation


def test_random_augmentation_is_refused_before_anything_is_solved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="augmented at random"):
        couplings_source.precompute(
            coupling_toys.Teacher(), coupling_toys.load_augmented, coupling_toys.make_spec(), tmp_path / "cache"
        )
    assert not list((tmp_path / "cache").glob("*.arrow"))


def test_stored_observations_make_augmented_couplings_right(tmp_path: Path) -> None:
    couplings_source.precompute(
        coupling_toys.Teacher(),
        coupling_toys.load_augmented,
        coupling_toys.make_spec(),
        tmp_path / "cache",
        store_observations=True,
    )
    source = couplings_source.CouplingSource.cached(tmp_path / "cache")
    for coupling in source:
        assert not torch.equal(coupling.observation["state"], coupling_toys.load(coupling.indices)["state"])
        assert torch.equal(coupling.target, coupling_toys.Teacher()(coupling.observation, coupling.noise))


def test_augmentation_and_other_data_are_noticed_while_training(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"observation of sample \d+ is not the one .*: random augmentation"):
        next(iter(couplings_source.CouplingSource.cached(folder, coupling_toys.load_augmented)))
    with pytest.raises(ValueError, match="holds no observations"):
        couplings_source.CouplingSource.cached(folder)
