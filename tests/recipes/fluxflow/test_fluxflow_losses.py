from dataclasses import replace

import pytest
import torch
from late_imports import LateModule

fluxflow_losses = LateModule("hf_memopt.recipes.fluxflow.step")
options = LateModule("hf_memopt.recipes.fluxflow.options")


def test_blurred_and_detailed_errors_are_weighted() -> None:
    target = torch.zeros(1, 1, 8, 8)
    flat, board = torch.ones_like(target), torch.ones(8, 8)
    board[::2, ::2] = board[1::2, 1::2] = -1
    fine = board.expand_as(target)
    assert fluxflow_losses.detail_weighted_l1(flat, target, 100.0) == 1  # borders are no detail
    coarse = fluxflow_losses.detail_weighted_l1(fine, target, 0.0).item()
    assert coarse < 0.2
    assert fluxflow_losses.detail_weighted_l1(fine, target, 1.0).item() == pytest.approx(coarse + 1, abs=0.2)


def test_kl_divergence_is_torchs_and_free_bits_are_free() -> None:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from torch.distributions import Normal, kl

    posterior = DiagonalGaussianDistribution(torch.randn(2, 8, 4, 4))
    expected = kl.kl_divergence(Normal(posterior.mean, posterior.std), Normal(0.0, 1.0))
    torch.testing.assert_close(fluxflow_losses.kl_divergence(posterior, 0.0), expected.mean())
    assert fluxflow_losses.kl_divergence(posterior, 100.0) == 100


def test_weights_warm_up_along_a_cosine() -> None:
    losses = options.LossOptions(kl_weight=2.0, kl_warmup_steps=100, adversarial_weight=0.5)
    found = [fluxflow_losses.weights_at(each, losses) for each in (0, 25, 50, 100, 1000)]
    assert [each.kl for each in found] == pytest.approx([0, 2 * 0.14644660940672627, 1, 2, 2])
    assert {each.adversarial for each in found} == {0.5}
    assert fluxflow_losses.weights_at(10, replace(losses, adversarial_warmup_steps=20)).adversarial == pytest.approx(
        0.25
    )


def test_hinge_loss_is_nothing_beyond_the_margin() -> None:
    assert fluxflow_losses.hinge_loss(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -3.0])) == 0
    assert fluxflow_losses.hinge_loss(torch.tensor([0.0]), torch.tensor([0.5])) == 2.5
