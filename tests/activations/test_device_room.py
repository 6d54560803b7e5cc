"""Tests that mode "auto" without a budget plans within the device's free memory, and recovers if it was too little."""

import logging
from collections.abc import Callable

import pytest
import torch
from card import Card
from gradients import equal, take_gradients
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations import offloader as offloader_module
from hf_memopt.activations import pass_planner
from hf_memopt.activations.plan_maker import USABLE, DeviceRoom
from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError
from hf_memopt.transfer import lower_memory
from hf_memopt.transfer.lower_memory import Place

WIDTH, LAYERS, LARGEST_BATCH = 64, 3, 48


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies slow, so that only memory is a reason for them."""
    monkeypatch.setattr(lower_memory, "measure_link", lambda copier, clock: (1e6, 1e6))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ActivationOffloader]:
    def make(card: Card, **options: object) -> ActivationOffloader:
        monkeypatch.setattr(offloader_module, "room_on", lambda device: DeviceRoom(card, device))
        return ActivationOffloader(offload_threshold_mb=0, copier=card.copier, **options)

    return make


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batch(step: int, smallest: int = 8) -> Tensor:
    lots = torch.Generator().manual_seed(step)
    size = int(torch.randint(smallest, LARGEST_BATCH + 1, (), generator=lots))
    return torch.randn(size, WIDTH, generator=lots)


def train_step(model: nn.Module, x: Tensor, card: Card, offloader: ActivationOffloader | None = None) -> list[Tensor]:
    """Take a step on the card, with a temporary tensor whose size depends on the batch."""
    with card:
        context = offloader.offload_context(model) if offloader else torch.enable_grad()
        with context:
            y = model(x * 1)
            y = y * (y.repeat(1, 2 + len(x) % 3).sum() * 0 + 1)
            loss = y.square().sum()
        loss.backward()
    return take_gradients(model)


def peak_bytes(step: Callable[[Card], object]) -> int:
    card = Card(2**40)
    step(card)
    return max(card.timeline)


def size_for_all(smallest: int) -> int:
    """Return the memory of a card on which everything offloaded just fits."""
    model = chain()

    def steps(card: Card) -> None:
        card.place(model)
        offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=card.copier)
        for _ in range(3):
            train_step(model, torch.randn(LARGEST_BATCH, WIDTH), card, offloader)
        for step in range(40):
            train_step(model, batch(step, smallest), card, offloader)

    return peak_bytes(steps)


@pytest.mark.e2e
@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize(("smallest", "num_steps"), [(LARGEST_BATCH, 100), (8, 1000)])
def test_what_fits_only_with_everything_offloaded_runs_on(
    make: Callable[..., ActivationOffloader], smallest: int, num_steps: int
) -> None:
    """Train with batches of one size and of many, on a card that is full when everything is offloaded."""
    model = chain()
    card = Card(size_for_all(smallest))
    card.place(model)
    offloader = make(card)
    for step in range(num_steps):
        x = batch(step, smallest)
        gradients = train_step(model, x, card, offloader)
        if step % 50 == 0:
            assert equal(gradients, train_step(model, x, Card(2**40)))
    assert card.num_ooms == 0
    with pytest.raises(torch.OutOfMemoryError):  # the plain run does not fit
        train_step(model, torch.randn(LARGEST_BATCH, WIDTH), card)


def planner_of(offloader: ActivationOffloader, model: nn.Module) -> pass_planner.PassPlanner:
    (planner,) = offloader._planners[model].values()
    return planner


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_card_in_between_is_used_and_never_exceeded(make: Callable[..., ActivationOffloader], share: float) -> None:
    """Check that more room moves less, and that the counted peak of the whole step stays within the card."""
    model = chain()
    x = torch.randn(LARGEST_BATCH, WIDTH)
    smallest = size_for_all(LARGEST_BATCH)
    plain = peak_bytes(lambda card: (card.place(model), train_step(model, x, card)))
    card = Card(int((smallest + share * (plain - smallest)) / USABLE))
    card.place(model)
    offloader = make(card)
    for _ in range(6):
        train_step(model, x, card, offloader)
    plan = planner_of(offloader, model).plan
    assert plan is not None
    assert card.num_ooms == 0
    before = card.copier.bytes_to_host
    train_step(model, x, card, offloader)
    saved = plan.kept_bytes + plan.offloaded_bytes + plan.recomputed_bytes
    assert card.copier.bytes_to_host - before == plan.offloaded_bytes < saved
    assert plan.predicted_peak_bytes == round(offloader.stats.measured_peak_gib * 2**30)


def test_optimizer_states_that_come_later_are_made_room_for(make: Callable[..., ActivationOffloader]) -> None:
    """Accumulate gradients, so that the optimizer makes its states after the recorded passes."""
    model = chain()
    states = 2 * sum(p.nbytes for p in model.parameters())
    x = torch.randn(LARGEST_BATCH, WIDTH)
    card = Card(int((size_for_all(LARGEST_BATCH) + states) / USABLE))
    card.place(model)
    offloader = make(card)
    for _ in range(4):
        train_step(model, x, card, offloader)
    before = planner_of(offloader, model).plan
    assert before is not None
    assert before.offloaded_bytes <= 4  # the loss at most
    with card:
        kept = [torch.zeros(2, WIDTH, WIDTH + 1) for _ in range(LAYERS)]
    for _ in range(3):
        train_step(model, x, card, offloader)
    after = planner_of(offloader, model).plan
    assert card.num_ooms == 0
    assert sum(tensor.nbytes for tensor in kept) == states
    assert after is None or after.predicted_peak_bytes < before.predicted_peak_bytes


def test_other_processes_memory_is_not_counted_on(make: Callable[..., ActivationOffloader]) -> None:
    model = chain()
    x = torch.randn(LARGEST_BATCH, WIDTH)
    plain = peak_bytes(lambda card: (card.place(model), train_step(model, x, card)))
    limits = []
    for elsewhere in (0, plain // 4):
        card = Card(2 * plain)
        card.elsewhere_bytes = elsewhere
        card.place(model)
        offloader = make(card)
        for _ in range(3):
            train_step(model, x, card, offloader)
        limits.append(planner_of(offloader, model)._maker.limit_bytes)
    assert limits[0] - limits[1] == pytest.approx(USABLE * (plain // 4), abs=2)


def test_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(1000)
    room = DeviceRoom(card, torch.device("cpu"))
    room.begin()
    assert room.limit_bytes() == int(USABLE * 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two processes on one device
    assert room.limit_bytes() == int(USABLE * 500)


def test_running_out_in_a_planned_pass_makes_the_plan_smaller(
    make: Callable[..., ActivationOffloader], caplog: pytest.LogCaptureFixture
) -> None:
    model = chain()
    x = torch.randn(LARGEST_BATCH, WIDTH)
    plain = peak_bytes(lambda card: (card.place(model), train_step(model, x, card)))
    card = Card(int(plain / USABLE))
    card.place(model)
    offloader = make(card)
    for _ in range(4):
        train_step(model, x, card, offloader)
    planned = planner_of(offloader, model).plan.predicted_peak_bytes
    with card:
        model.register_forward_hook(hook := BigOnce(card))
        with pytest.raises(torch.OutOfMemoryError):
            train_step(model, x, card, offloader)
    model.zero_grad()
    assert hook.is_over
    with caplog.at_level(logging.WARNING):
        gradients = train_step(model, x, card, offloader)
    assert "ran out of memory" in caplog.text
    assert equal(gradients, train_step(model, x, Card(2**40)))
    now = planner_of(offloader, model).plan
    assert now is None or now.predicted_peak_bytes <= 0.7 * planned
    assert offloader.stats.host_bytes_live == 0


def test_a_log_that_is_kept_keeps_no_errors(
    make: Callable[..., ActivationOffloader], caplog: pytest.LogCaptureFixture
) -> None:
    """Check the log after errors, whose tracebacks would keep all tensors of their steps."""
    model, x, card = chain(), torch.randn(LARGEST_BATCH, WIDTH), Card(2**40)
    tight = make(card, budget_gib=1e-9)
    train_step(model, x, card, tight)
    with pytest.raises(InfeasibleBudgetError) as error:
        train_step(model, x, card, tight)
    offloader = make(card, budget_gib=error.value.smallest_bytes / 2**30)
    for _ in range(3):
        train_step(model, x, card, offloader)
    planner_of(offloader, model).break_off(ran_out=True)
    with caplog.at_level(logging.INFO):
        train_step(model, x, card, offloader)
    assert "going on with the smallest" in caplog.text
    values = [value for record in caplog.records for value in record.args or ()]
    assert not [value for value in values if isinstance(value, BaseException)]


class BigOnce:
    """A hook that asks for more than the card's memory at the end of one forward pass."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.is_over = False

    def __call__(self, *arguments: object) -> None:
        if not self.is_over:
            self.is_over = True
            torch.zeros(self._card.total_bytes, dtype=torch.uint8)


def test_a_reload_that_finds_no_memory_waits_for_what_is_leaving() -> None:
    """Fill the device with sources of copies to the host, which release their memory."""
    model = chain()
    card = Card(2**30)
    card.place(model)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=card.copier)
    x = torch.randn(LARGEST_BATCH, WIDTH)
    want = train_step(model, x, card)
    with card:
        with offloader.offload_context(model):
            loss = model(x * 1).square().sum()
        engine = next(iter(offloader._devices.values()))
        leaving = engine._leaving_bytes
        assert leaving > 0
        card.total_bytes = card.allocated_bytes + x.nbytes // 2
        with torch.no_grad():
            # More bytes than are free, fewer than are leaving.
            block = engine.empty_device(x.nbytes, Place(engine.lower[0], None), 0)
        card.total_bytes = 2**30
        assert engine._leaving_bytes == 0
        del block
        loss.backward()
    assert equal(take_gradients(model), want)
