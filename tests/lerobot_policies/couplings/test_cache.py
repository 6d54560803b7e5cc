import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
coupling_spec = LateModule("hf_memopt.lerobot.couplings.cache")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
writer = LateModule("hf_memopt.lerobot.couplings.cache")


def test_couplings_on_disk_are_the_teachers_bit_for_bit(folder: Path) -> None:
    state = torch.get_rng_state()
    coupling_toys.assert_is_the_teachers(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_of_a_sample_differ(folder: Path) -> None:
    index = coupling_toys.make_spec().indices[0]
    observation = coupling_toys.load([index, index])
    noise = couplings_cache.CouplingCache(folder).of([index, index], [0, 1], observation).noise
    assert not torch.equal(noise[0], noise[1])


def test_a_target_solves_the_teachers_ode(folder: Path) -> None:
    index = coupling_toys.make_spec().indices[5]
    coupling = couplings_cache.CouplingCache(folder).of([index], [1], coupling_toys.load([index]))
    noise = coupling_spec.draw_noise([coupling_spec.noise_seed(7, index, 1)], coupling_toys.SHAPE)
    assert torch.equal(coupling.noise, noise)
    # Computed in a batch of four, so rounding may differ.
    torch.testing.assert_close(coupling.target, coupling_toys.Teacher()(coupling_toys.load([index]), noise).detach())


def test_a_sample_without_couplings_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no couplings for sample 99"):
        couplings_cache.CouplingCache(folder).of([100, 99], [0, 0], coupling_toys.load([100, 99]))


def test_copies_and_pickles_read_the_folder_anew(folder: Path) -> None:
    cache = couplings_cache.CouplingCache(folder)
    pickled = pickle.dumps(cache)
    assert len(pickled) < 1000
    twin, index = pickle.loads(pickled), coupling_toys.make_spec().indices[0]
    assert torch.equal(
        twin.of([index], [0], coupling_toys.load([index])).target,
        cache.of([index], [0], coupling_toys.load([index])).target,
    )


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
        couplings_cache.CouplingCache(folder).check(stale.key)
    with pytest.raises(ValueError, match=rf"not the ones asked for: {field} is"):
        writer.precompute(coupling_toys.Teacher(), coupling_toys.load, stale, folder, shard_size=8)


def test_augmentation_and_other_data_are_noticed(folder: Path) -> None:
    index = coupling_toys.make_spec().indices[3]
    with pytest.raises(ValueError, match=rf"observation of sample {index} is not the one .*: random augmentation"):
        couplings_cache.CouplingCache(folder).of([index], [0], coupling_toys.load_augmented([index]))


def test_stored_observations_make_augmented_couplings_right(tmp_path: Path) -> None:
    spec = coupling_toys.make_spec()
    writer.precompute(
        coupling_toys.Teacher(), coupling_toys.load_augmented, spec, tmp_path / "cache", store_observations=True
    )
    cache = couplings_cache.CouplingCache(tmp_path / "cache")
    assert cache.has_observations
    for number in range(spec.num_batches):
        indices, draw = spec.batch(number)
        coupling = cache.of(indices, [draw] * len(indices), None)
        assert not torch.equal(coupling.observation["state"], coupling_toys.load(indices)["state"])
        assert torch.equal(coupling.target, coupling_toys.Teacher()(coupling.observation, coupling.noise))
