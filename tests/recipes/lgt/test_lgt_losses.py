import pytest
import torch
from lgt_toys import random_batch, tiny
from torch import Tensor

from hf_memopt.recipes.lgt.step import self_similarity_difference, sliced_wasserstein


def test_losses_compute_in_float32_under_autocast() -> None:
    config = tiny()
    batch = random_batch(config)
    results = []
    for enabled in (False, True):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pair = batch["start"], batch["target_latents"]
            results.append(torch.stack([sliced_wasserstein(*pair), self_similarity_difference(*pair)]))
    assert torch.equal(*results)
    assert sliced_wasserstein(*(each.bfloat16() for each in pair)).dtype == torch.float32


def test_sliced_wasserstein_compares_distributions() -> None:
    torch.manual_seed(0)
    latents = torch.randn(4, 4, 8, 8)
    assert sliced_wasserstein(latents, latents.flip(0)) == pytest.approx(0, abs=1e-12)
    assert sliced_wasserstein(latents, latents + 1) > 0.5
    assert sliced_wasserstein(latents, latents + 1, max_samples=50) > 0.5
    shifted = 3 * torch.ones(4, 4, 8, 8)
    # A patch of 9 equal positions in 4 channels: 9 times the square of a sum of 36 entries of a random unit vector.
    inner = sliced_wasserstein(0 * shifted, shifted, patch_size=1, num_projections=20_000)
    assert inner == pytest.approx(9.0, rel=0.05)


def test_self_similarity_sees_structure_and_not_its_scale() -> None:
    torch.manual_seed(0)
    latents = torch.randn(4, 4, 8, 8)
    assert self_similarity_difference(3 * latents, latents) == pytest.approx(0, abs=1e-12)
    others = torch.randn(4, 4, 8, 8)
    full = self_similarity_difference(others, latents)
    assert full == pytest.approx(0.5, rel=0.1)  # two independent squared cosines of 4 channels
    assert self_similarity_difference(others, latents, 32) == pytest.approx(full.item(), rel=0.2)
    assert self_similarity_difference(others, latents, 32) != full
    halves = [self_similarity_difference(others[rows], latents[rows]) for rows in (slice(2), slice(2, 4))]
    assert torch.stack(halves).mean() == pytest.approx(full.item(), rel=1e-6)


def test_the_mean_over_halves_overestimates_the_sliced_wasserstein_distance() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 16, 4, 8, 8).unbind()

    def distance(rows: slice) -> Tensor:
        torch.manual_seed(1)
        return sliced_wasserstein(ours[rows], theirs[rows])

    assert (distance(slice(8)) + distance(slice(8, 16))) / 2 > 1.3 * distance(slice(16))
