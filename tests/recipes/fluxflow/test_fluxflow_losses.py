"""FluxFlow's losses, each on what its value is known for."""

from dataclasses import replace

import pytest
import torch

from hf_memopt.recipes.fluxflow.losses import detail_weighted_l1, hinge_loss, kl_divergence, weights_at
from hf_memopt.recipes.fluxflow.options import LossOptions


def test_blurred_and_detailed_errors_are_weighted() -> None:
    target = torch.zeros(1, 1, 8, 8)
    flat, board = torch.ones_like(target), torch.ones(8, 8)
    board[::2, ::2] = board[1::2, 1::2] = -1
    fine = board.expand_as(target)
    assert detail_weighted_l1(flat, target, 100.0) == 1  # borders are no detail
    coarse = detail_weighted_l1(fine, target, 0.0).item()
    assert coarse < 0.2
    assert detail_weighted_l1(fine, target, 1.0).item() == pytest.approx(coarse + 1, abs=0.2)


def test_kl_divergence_is_torchs_and_free_bits_are_free() -> None:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from torch.distributions import Normal, kl

    posterior = DiagonalGaussianDistribution(torch.randn(2, 8, 4, 4))
    expected = kl.kl_divergence(Normal(posterior.mean, posterior.std), Normal(0.0, 1.0))
    torch.testing.assert_close(kl_divergence(posterior, 0.0), expected.mean())
    assert kl_divergence(posterior, 100.0) == 100


def test_weights_warm_up_along_a_cosine() -> None:
    losses = LossOptions(kl_weight=2.0, kl_warmup_steps=100, adversarial_weight=0.5)
    found = [weights_at(each, losses) for each in (0, 25, 50, 100, 1000)]
    assert [each.kl for each in found] == pytest.approx([0, 2 * 0.14644660940672627, 1, 2, 2])
    assert {each.adversarial for each in found} == {0.5}
    assert weights_at(10, replace(losses, adversarial_warmup_steps=20)).adversarial == pytest.approx(0.25)


def test_hinge_loss_is_nothing_beyond_the_margin() -> None:
    assert hinge_loss(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -3.0])) == 0
    assert hinge_loss(torch.tensor([0.0]), torch.tensor([0.5])) == 2.5
