"""Couplings are found by sample and draw."""

import pickle
from pathlib import Path

import pytest
import torch
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
key = LateModule("hf_memopt.lerobot.couplings.key")


def test_a_target_solves_the_teachers_ode(folder: Path) -> None:
    index = coupling_toys.make_spec().indices[5]
    coupling = couplings_cache.CouplingCache(folder).of([index], [1], coupling_toys.load([index]))
    noise = key.draw_noise([key.noise_seed(7, index, 1)], coupling_toys.SHAPE)
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
