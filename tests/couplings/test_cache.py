"""Couplings are found by sample and draw."""

import pickle
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import these when the first test runs: collecting tests must not cost their seconds."""
    global CouplingCache, draw_noise, load, make_plan, noise_seed, SHAPE, Teacher
    from coupling_toys import SHAPE, Teacher, load, make_plan

    from hf_memopt.couplings.cache import CouplingCache
    from hf_memopt.couplings.key import draw_noise, noise_seed


def test_a_target_solves_the_teachers_ode(folder: Path) -> None:
    index = make_plan().indices[5]
    coupling = CouplingCache(folder).of([index], [1], load([index]))
    noise = draw_noise([noise_seed(7, index, 1)], SHAPE)
    assert torch.equal(coupling.noise, noise)
    # Computed in a batch of four, so rounding may differ.
    torch.testing.assert_close(coupling.target, Teacher()(load([index]), noise).detach())


def test_a_sample_without_couplings_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no couplings for sample 99"):
        CouplingCache(folder).of([100, 99], [0, 0], load([100, 99]))


def test_copies_and_pickles_read_the_folder_anew(folder: Path) -> None:
    cache = CouplingCache(folder)
    pickled = pickle.dumps(cache)
    assert len(pickled) < 1000
    twin, index = pickle.loads(pickled), make_plan().indices[0]
    assert torch.equal(twin.of([index], [0], load([index])).target, cache.of([index], [0], load([index])).target)
