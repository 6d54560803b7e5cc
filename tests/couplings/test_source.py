"""Couplings from disk are those of the teacher, bit for bit; whatever else a folder holds is refused."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from coupling_toys import NUM_SAMPLES, SHAPE, Teacher, assert_same, load, load_augmented, make_plan, write
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.couplings.key import draw_noise, noise_seed, observation_checksums
from hf_memopt.couplings.source import CouplingCache, CouplingPlan, CouplingSource, precompute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cache of `make_plan()`. Read only."""
    path = tmp_path_factory.mktemp("couplings") / "cache"
    assert write(path) == []
    return path


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder, tmp_path / "cache"))


# ------------------------------------------------------------------------------------------------ the same couplings


@pytest.mark.parametrize("world_size", [1, 2])
def test_cached_is_online_bit_for_bit_on_every_rank(folder: Path, world_size: int) -> None:
    plan, state = make_plan(), torch.get_rng_state()
    for rank in range(world_size):
        online = CouplingSource.online(Teacher(), load, plan, rank=rank, world_size=world_size)
        cached = CouplingSource.cached(folder, load, expected=plan.key, rank=rank, world_size=world_size)
        assert_same(online, cached, num_epochs=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_takes_each_sample_once_and_epochs_differ() -> None:
    source = CouplingSource.online(Teacher(), load, make_plan(num_draws=2))
    seen = []
    for epoch in range(3):
        source.set_epoch(epoch)
        seen.append({index: c.noise[row] for c in source for row, index in enumerate(c.indices)})
    assert all(sorted(epoch) == sorted(make_plan().indices) for epoch in seen)
    assert list(seen[0]) != list(seen[1])
    index = make_plan().indices[0]
    assert torch.equal(seen[0][index], seen[2][index])  # two draws, so the third epoch repeats the first's
    assert not torch.equal(seen[0][index], seen[1][index])


def test_ranks_take_different_samples_and_as_many() -> None:
    plan = make_plan(batch_size=2)
    ranks = [CouplingSource.online(Teacher(), load, plan, rank=rank, world_size=3) for rank in range(3)]
    assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks] == [4, 4, 4]
    taken = [index for rank in ranks for coupling in rank for index in coupling.indices]
    assert len(set(taken)) == len(taken) == NUM_SAMPLES


def test_a_target_solves_the_teachers_ode(folder: Path) -> None:
    index = make_plan().indices[5]
    coupling = CouplingCache(folder).of([index], [1], load([index]))
    noise = draw_noise([noise_seed(7, index, 1)], SHAPE)
    assert torch.equal(coupling.noise, noise)
    # Computed in a batch of four, so rounding may differ.
    torch.testing.assert_close(coupling.target, Teacher()(load([index]), noise).detach())


def test_the_folder_is_a_dataset_of_the_datasets_library(folder: Path) -> None:
    rows = datasets.load_from_disk(str(folder))
    assert rows.num_rows == 2 * NUM_SAMPLES
    assert rows[0]["noise_seed"] == noise_seed(7, rows[0]["index"], 0)
    assert len(rows[0]["target"]) == 6
    assert len(rows.cache_files) == 6


def test_training_on_cached_couplings_is_training_online(folder: Path) -> None:
    weights = []
    for source in (CouplingSource.online(Teacher(), load, make_plan()), CouplingSource.cached(folder, load)):
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
    stale = make_plan(**{field: value})
    with pytest.raises(ValueError, match=rf"not the ones asked for: {field} is .* there and .* here\. "):
        CouplingSource.cached(folder, load, expected=stale.key)
    with pytest.raises(ValueError, match=rf"not the ones asked for: {field} is"):
        precompute(Teacher(), load, stale, folder, shard_size=8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_draws": 3}, "num_draws"), ({"batch_size": 2}, "batch_size"), ({"num_samples": 22}, "num_samples")],
)
def test_a_folder_is_completed_with_its_own_plan_only(folder: Path, changes: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        precompute(Teacher(), load, make_plan(**changes), folder, shard_size=8)


def test_every_truncation_and_every_flipped_byte_is_found(own: Path) -> None:
    file = own / "data-00003-of-00006.arrow"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[:100], b"", bytes(flipped), whole + b"\0"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"data-00003-of-00006\.arrow is truncated or damaged"):
            CouplingSource.cached(own, load)
    file.write_bytes(whole)
    CouplingSource.cached(own, load)


def test_an_unfinished_cache_is_refused_and_repaired_by_the_same_command(own: Path) -> None:
    (own / "data-00002-of-00006.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00002-of-00006\.arrow is missing"):
        CouplingSource.cached(own, load)
    before = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert write(own) == []
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
    assert_same(CouplingSource.online(Teacher(), load, make_plan()), CouplingSource.cached(own, load), 2)


def test_folders_without_couplings_are_refused(tmp_path: Path, own: Path) -> None:
    with pytest.raises(ValueError, match="holds no couplings"):
        CouplingCache(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex"):
        write(tmp_path / "other")
    (own / "couplings.json").write_text("{")
    with pytest.raises(ValueError, match=r"couplings.json is damaged"):
        CouplingCache(own)


def test_unusable_plans_are_refused() -> None:
    plan = make_plan()
    for changes, message in (
        ({"num_draws": 0}, "num_draws=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"indices": [1, 1]}, "each once"),
        ({"indices": []}, "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            CouplingPlan(**{**vars(plan), **changes})
    with pytest.raises(ValueError, match="shard_size=0 must be"):
        precompute(Teacher(), load, plan, "never", shard_size=0)
    with pytest.raises(ValueError, match="too few for 9 ranks"):
        CouplingSource.online(Teacher(), load, plan, world_size=9)
    with pytest.raises(ValueError, match="rank=2 must be"):
        CouplingSource.online(Teacher(), load, plan, rank=2, world_size=2)


def test_a_sample_without_couplings_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no couplings for sample 99"):
        CouplingCache(folder).of([100, 99], [0, 0], load([100, 99]))


# ------------------------------------------------------------------------------------------------ augmentation


def test_random_augmentation_is_refused_before_anything_is_solved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="augmented at random"):
        precompute(Teacher(), load_augmented, make_plan(), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.arrow"))


def test_stored_observations_make_augmented_couplings_right(tmp_path: Path) -> None:
    precompute(Teacher(), load_augmented, make_plan(), tmp_path / "cache", store_observations=True)
    source = CouplingSource.cached(tmp_path / "cache")
    for coupling in source:
        assert not torch.equal(coupling.observation["state"], load(coupling.indices)["state"])
        assert torch.equal(coupling.target, Teacher()(coupling.observation, coupling.noise))


def test_augmentation_and_other_data_are_noticed_while_training(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"observation of sample \d+ is not the one .*: random augmentation"):
        next(iter(CouplingSource.cached(folder, load_augmented)))
    with pytest.raises(ValueError, match="holds no observations"):
        CouplingSource.cached(folder)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_checksum_changes_with_any_bit_and_with_the_order(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]))
    values = torch.arange(1, 13).to(dtype).reshape(2, 2, 3)
    before = observation_checksums({"a": values, "b": values > 3})
    flat = values[1].flatten().view(torch.uint8)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = observation_checksums({"a": values, "b": torch.arange(1, 13).reshape(2, 2, 3) > 3})
    assert after[0] == before[0]
    assert after[1] != before[1]
    mirrored = observation_checksums({"a": torch.arange(1, 13).to(dtype).reshape(2, 2, 3).flip(2)})
    assert (mirrored != observation_checksums({"a": torch.arange(1, 13).to(dtype).reshape(2, 2, 3)})).all()


def test_a_checksum_ignores_padding_and_neighbours() -> None:
    tokens = torch.tensor([[5, 7, 9], [5, 7, 0]])
    sums = observation_checksums({"tokens": tokens})
    assert sums[0] != sums[1]
    assert observation_checksums({"tokens": tokens[1:, :2]})[0] == sums[1]
