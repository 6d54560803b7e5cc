"""Tests of mode "auto": bitwise gradients under any plan, and predictions equal to measurements."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS, AdversarialCopier
from gradients import equal, take_gradients
from random_plans import plan_at_random
from tiny_decoders import tiny_decoder
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations import plan_maker
from hf_memopt.activations.planner.candidates import Candidate, CopyWindow, Trials
from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, OffloadPlan, _plan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.activations.planner.simulator import simulate
from hf_memopt.memory import SavedBytes
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.tier import Tier

pytestmark = pytest.mark.usefixtures("quick_plans")

GIB = 2**30


@pytest.fixture(params=["sync", "late", "random"])
def copier(request: pytest.FixtureRequest) -> Copier:
    return COPIERS[request.param]()


@pytest.fixture
def decoder() -> nn.Module:
    return tiny_decoder(num_hidden_layers=3, attention_dropout=0.1)


def language_loss(model: nn.Module, tokens: Tensor, autocast: bool = False) -> Tensor:
    torch.manual_seed(7)  # for dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(input_ids=tokens, labels=tokens).loss


def step(offloader: ActivationOffloader, model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    with offloader.offload_context(model):
        value = loss()
    value.backward()
    return take_gradients(model)


def recompute_all(profile: Profile, tiers: Sequence[Tier], **limits: Any) -> OffloadPlan:
    """Return a plan that recomputes every storage that can be recomputed, and offloads the others."""
    actions = bytes(Action.OFFLOAD if storage.recompute_s is None else Action.RECOMPUTE for storage in profile.storages)
    timeline = simulate(profile, actions, tiers, in_flight_bytes=0, prefetch_bytes=0)
    candidate = Candidate(actions, bytes(len(actions)), CopyWindow(0, 0), 0, 0, timeline, None)
    return _plan(Trials(profile, tiers, 0, num_left=0), candidate)


def saved_gib(model: nn.Module, tokens: Tensor) -> float:
    with SavedBytes(exclude=model.parameters()) as saved:
        language_loss(model, tokens)
    return saved.total_bytes / GIB


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("autocast", [False, True])
def test_any_plan_gives_the_plain_gradients_and_the_predicted_peak(
    decoder: nn.Module, tokens: Tensor, copier: Copier, seed: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_maker, "make_plan", plan_at_random(seed, in_flight=seed % 3, ahead=seed))
    language_loss(decoder, tokens, autocast).backward()
    want = take_gradients(decoder)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=copier)
    for _ in range(4):
        assert equal(step(offloader, decoder, lambda: language_loss(decoder, tokens, autocast)), want)
    stats = offloader.stats
    assert stats.measured_peak_gib == stats.predicted_peak_gib
    assert stats.host_bytes_live == 0
    (engine,) = offloader._devices.values()
    assert engine.held.now_bytes == 0
    (planner,) = offloader._planners[decoder].values()
    assert set(planner.plan.actions) == set(Action)


def test_what_is_modified_in_place_later_is_not_computed_from(monkeypatch: pytest.MonkeyPatch, copier: Copier) -> None:
    """Check a residual stream that no operation saves, so that eager mode allows its modification."""
    monkeypatch.setattr(plan_maker, "make_plan", plan_at_random(seed=0))
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def loss() -> Tensor:
        stream = first(torch.ones(4, 8))
        normed = stream.double().sin()  # saves the cast, which could be recomputed from the stream
        stream += second(normed.float())
        return stream.square().sum()

    model = nn.ModuleList([first, second])
    loss().backward()
    want = take_gradients(model)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=copier)
    for _ in range(4):
        assert equal(step(offloader, model, loss), want)


def test_a_modification_that_was_not_there_when_recorded_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a modification of a source that autograd has not saved, which the plain run allows."""
    monkeypatch.setattr(plan_maker, "make_plan", recompute_all)
    layer = nn.Linear(8, 8)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())

    def forward(modify: bool) -> Tensor:
        with offloader.offload_context(layer):
            stream = layer(torch.ones(4, 8))
            loss = stream.double().sin().sum()
        if modify:
            with torch.no_grad():
                stream.add_(1)
        return loss

    for modify in (False, False, False, True):
        forward(modify).backward()
        found = take_gradients(layer)
        layer(torch.ones(4, 8)).double().sin().sum().backward()
        assert equal(take_gradients(layer), found)
    assert offloader.stats.bytes_recomputed > 0


def test_a_plan_that_recomputes_survives_autograds_corners(
    decoder: nn.Module, tokens: Tensor, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_maker, "make_plan", recompute_all)
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=copier)
    for _ in range(3):
        step(offloader, decoder, lambda: language_loss(decoder, tokens))
    with offloader.offload_context(decoder):
        first = language_loss(decoder, tokens)
    with offloader.offload_context(decoder):
        second = language_loss(decoder, tokens.flip(1))
    first.backward(retain_graph=True)
    assert equal(take_gradients(decoder), want)
    second.backward()
    decoder.zero_grad()
    first.backward()
    assert equal(take_gradients(decoder), want)
    with pytest.raises(IndexError), offloader.offload_context(decoder):
        language_loss(decoder, tokens + 1000)
    del first, second
    gc.collect()
    assert offloader.stats.host_bytes_live == 0
    (engine,) = offloader._devices.values()
    assert engine.held.now_bytes == 0
    assert equal(step(offloader, decoder, lambda: language_loss(decoder, tokens)), want)


def test_double_backward_through_recomputed_tensors(monkeypatch: pytest.MonkeyPatch, copier: Copier) -> None:
    monkeypatch.setattr(plan_maker, "make_plan", recompute_all)
    torch.manual_seed(1)
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def penalty() -> Tensor:
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(layer(y).exp()).sum(), y, create_graph=True)
        return gradient.square().sum()

    penalty().backward()
    want = take_gradients(layer)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=copier)
    for _ in range(4):
        assert equal(step(offloader, layer, penalty), want)


def test_modules_that_are_made_for_one_call_may_be_gone(monkeypatch: pytest.MonkeyPatch, copier: Copier) -> None:
    """Check a module made for one call, as transformers makes around kernels implemented in torch."""
    monkeypatch.setattr(plan_maker, "make_plan", recompute_all)
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    def loss() -> Tensor:
        return Sine()(layer(torch.ones(4, 8))).exp().sum()

    loss().backward()
    want = take_gradients(layer)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=copier)
    for _ in range(4):
        assert equal(step(offloader, layer, loss), want)
    (planner,) = offloader._planners[layer].values()
    assert Action.RECOMPUTE in set(planner.plan.actions)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_budget_is_kept_and_met_as_predicted(decoder: nn.Module, tokens: Tensor, share: float) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    total_gib = saved_gib(decoder, tokens)
    offloader = ActivationOffloader(
        offload_threshold_mb=0, budget_gib=share * total_gib, copier=AdversarialCopier("late")
    )
    for _ in range(4):
        assert equal(step(offloader, decoder, lambda: language_loss(decoder, tokens)), want)
    stats = offloader.stats
    assert stats.measured_peak_gib == stats.predicted_peak_gib <= share * total_gib
    assert stats.predicted_step_ms > 0
    assert stats.measured_step_ms > 0


def test_an_impossible_budget_names_the_smallest_possible_one(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, budget_gib=1e-9, copier=SyncCopier())
    step(offloader, decoder, lambda: language_loss(decoder, tokens))
    with pytest.raises(InfeasibleBudgetError, match="budget_gib") as error, offloader.offload_context(decoder):
        pass
    possible = ActivationOffloader(
        offload_threshold_mb=0, budget_gib=error.value.smallest_bytes / GIB, copier=SyncCopier()
    )
    for _ in range(2):
        step(possible, decoder, lambda: language_loss(decoder, tokens))
    assert possible.stats.measured_peak_gib <= error.value.smallest_bytes / GIB


def test_larger_batches_keep_to_the_budget_and_are_planned_for(decoder: nn.Module, tokens: Tensor) -> None:
    budget_gib = 0.6 * saved_gib(decoder, tokens)
    offloader = ActivationOffloader(offload_threshold_mb=0, budget_gib=budget_gib, copier=SyncCopier())
    for _ in range(3):
        step(offloader, decoder, lambda: language_loss(decoder, tokens))
    (planner,) = offloader._planners[decoder].values()
    planned_for = sum(planner.recording.sizes)
    longer = tokens.repeat(1, 2)
    language_loss(decoder, longer).backward()
    want = take_gradients(decoder)
    for _ in range(3):
        assert equal(step(offloader, decoder, lambda: language_loss(decoder, longer)), want)
    assert offloader.stats.measured_peak_gib <= budget_gib
    assert sum(planner.recording.sizes) > 1.5 * planned_for
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    assert equal(step(offloader, decoder, lambda: language_loss(decoder, tokens)), want)


def test_each_model_has_a_plan_of_its_own_and_copies_plan_anew(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())
    offloader.wrap(decoder)
    twin = copy.deepcopy(decoder)
    for model in (decoder, twin):
        for _ in range(3):
            language_loss(model, tokens).backward()
    assert list(offloader._planners) == [decoder]
    assert equal(take_gradients(decoder), take_gradients(twin))


def test_plans_do_not_keep_models() -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())
    layer = nn.Linear(4, 4)
    with offloader.offload_context(layer):
        loss = layer(torch.ones(2, 4)).square().sum()
    loss.backward()
    assert len(offloader._planners) == 1
    reference = weakref.ref(layer)
    del layer, loss
    gc.collect()
    assert reference() is None
    assert not offloader._planners


@pytest.mark.parametrize("options", [{"mode": "some"}, {"mode": "all", "budget_gib": 1.0}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        ActivationOffloader(**options)
