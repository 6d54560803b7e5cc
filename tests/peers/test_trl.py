"""Tests after TRL's: its activation offloading (tests/test_activation_offloading.py).

The ideas are Hugging Face's, licensed under Apache 2.0; the code is our own, and models come from configurations.
"""

from typing import Any

import pytest
import torch
from gradients import equal, take_gradients
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import Copier

pytestmark = pytest.mark.sweep(share=1 / 4)

NUM_STEPS = 4  # of which mode "auto" records two
KIB = 2**10


@pytest.fixture
def decoder() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).train()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(1))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    torch.manual_seed(42)  # for dropout
    return model(input_ids=tokens, labels=tokens).loss


def test_adapters_get_the_plain_gradients(offloader: ActivationOffloader, decoder: nn.Module, tokens: Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(decoder, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    language_loss(model, tokens).backward()
    want = take_gradients(model)
    assert len(want) == len([name for name, _ in model.named_parameters() if "lora_" in name])
    for _ in range(NUM_STEPS):
        with offloader.offload_context(model):
            loss = language_loss(model, tokens)
        loss.backward()
        assert equal(take_gradients(model), want)


def test_hooks_that_do_nothing_shield_what_they_surround(
    offloader: ActivationOffloader, decoder: nn.Module, tokens: Tensor
) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    for _ in range(NUM_STEPS):
        with offloader.offload_context(decoder):
            language_loss(decoder, tokens).backward()
            assert equal(take_gradients(decoder), want)
            moved = offloader.stats.bytes_moved
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                language_loss(decoder, tokens).backward()
            assert equal(take_gradients(decoder), want)
            assert offloader.stats.bytes_moved == moved


def test_small_tensors_stay(copier: Copier) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1000), nn.Sigmoid())
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=1 / KIB, copier=copier)
    with offloader.offload_context(model):
        model(torch.randn(2, 5)).sum().backward()
    assert offloader.stats.bytes_moved == 2 * 1000 * 4  # the result of sigmoid
    assert offloader.stats.bytes_kept > 0


class TwoViews(nn.Module):
    """A model that saves one product flat and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        product = self.linear(x)
        return product.view(-1).square().sum() + product.t().square().sum()


def test_views_of_one_storage_travel_once(copier: Copier) -> None:
    model, x = TwoViews(), torch.randn(10, 100)
    model(x).backward()
    want = take_gradients(model)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)
    with offloader.offload_context(model):
        loss = model(x)
    assert offloader.stats.bytes_moved == x.nbytes + 10 * 100 * 4
    assert offloader.stats.bytes_deduplicated == 10 * 100 * 4
    loss.backward()
    assert equal(take_gradients(model), want)


class SaveDouble(Function):
    """A function that saves a tensor dropped at the end of forward, so that its address is used again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (double,) = ctx.saved_tensors
        return double * gradient


def test_a_reused_address_is_another_tensor(offloader: ActivationOffloader) -> None:
    leaves = [torch.full((4, 4), float(value), requires_grad=True) for value in range(50)]
    for _ in range(NUM_STEPS):
        with offloader.offload_context():
            loss = sum(SaveDouble.apply(leaf) for leaf in leaves)
        gradients = torch.autograd.grad(loss, leaves)
        assert equal(list(gradients), [2 * leaf.detach() for leaf in leaves])


class UsedAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return self.used(x).square().sum(), self.unused(x).square().sum()


def test_branches_without_backward_do_not_pile_up(offloader: ActivationOffloader) -> None:
    model = UsedAndUnused()
    for _ in range(8):
        x = torch.randn(4, 8)
        used, unused = model(x)
        want = torch.autograd.grad(used, model.used.parameters())
        with offloader.offload_context(model):
            used, unused = model(x)
        assert equal(list(torch.autograd.grad(used, model.used.parameters())), list(want))
        del used, unused
        assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("known", [False, True])
def test_parameters_stay(copier: Copier, known: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 10))
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)
    with offloader.offload_context(model if known else None):
        model(torch.randn(3, 10)).sum().backward()
    assert offloader.stats.bytes_moved == (3 * 10 + 3 * 20) * 4


def test_what_is_broadcast_travels_without_its_repetitions(offloader: ActivationOffloader) -> None:
    """Check an expanded tensor, which TRL keeps because its copies would not be expanded."""
    row = torch.randn(1, 8, requires_grad=True)
    others = torch.randn(64, 8)
    want = torch.autograd.grad((row.expand(64, 8) * others).exp().sum(), row)
    for _ in range(NUM_STEPS):
        before = offloader.stats.bytes_moved
        with offloader.offload_context():
            wide = (row * 1).expand(64, 8)
            loss = (wide * others).exp().sum()
        assert equal(list(torch.autograd.grad(loss, row)), list(want))
        assert offloader.stats.bytes_moved - before <= row.nbytes + 2 * others.nbytes
