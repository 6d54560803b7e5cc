"""Tests of streamed weights under interrupts at any moment."""

import gc
import random
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from frozen_bases import WIDTH, adapted, ids, same, square_loss, streamed, train, trainable
from interrupts import Interrupter, leave_contexts_of_torch
from torch import Tensor, nn

from hf_memopt import StreamedWeights
from hf_memopt.weights.homes.home import make_home
from hf_memopt.weights.residency.backward_visits import WithStatement


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python swallows it in callbacks
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.5)
def test_the_next_pass_is_right_after_an_interrupt_at_any_moment(home: str, tmp_path: Path) -> None:
    plain, model = adapted("non-reentrant"), adapted("non-reentrant")
    want = train(plain, square_loss, steps=1)
    base = streamed(model, home=home, disk=tmp_path)
    begun = time.perf_counter()
    train(model, square_loss, base, steps=3)
    step_s = (time.perf_counter() - begun) / 3
    weights = [each.clone() for each in adapted().parameters() if each.requires_grad]
    chance = random.Random(0)
    num_interrupted = 0
    for _ in range(60):
        try:
            with interrupted_after(chance.uniform(1e-5, step_s)):
                with base.stream():
                    loss = square_loss(model)
                loss.backward()
        except KeyboardInterrupt:
            num_interrupted += 1
            leave_contexts_of_torch()
        for mine, its in zip(trainable(model), weights, strict=True):
            mine.grad, mine.data = None, its.clone()
        assert same(train(model, square_loss, base, steps=1), want)
        with base.stream():
            assert base.report().device_bytes == 0
    assert num_interrupted > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["host", "file", "file for a device"])
@pytest.mark.sweep(share=0.3)
def test_the_next_pass_is_right_after_an_interrupt_at_any_place(kind: str, tmp_path: Path) -> None:
    model = adapted("non-reentrant")
    want = train(adapted("non-reentrant"), square_loss, steps=1)
    weights = [each.clone() for each in trainable(model)]
    copier = None if kind == "file" else AdversarialCopier("late")
    base = streamed(model, home=kind.split()[0], disk=tmp_path, copier=copier)

    def step() -> None:
        with base.stream():
            loss = square_loss(model)
        loss.backward()

    interrupter = Interrupter("/hf_memopt/weights/", "/hf_memopt/transfer/")
    for place in interrupter.at_places(step, 60):
        for mine, its in zip(trainable(model), weights, strict=True):
            mine.grad, mine.data = None, its.clone()
        assert same(train(model, square_loss, base, steps=1), want), place
        with base.stream():
            assert base.report().device_bytes == 0, place
        assert copier is None or copier.live_bytes == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.5)
def test_nothing_is_left_of_an_interrupted_visit(home: str, tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)

    def read() -> None:
        with base.visit(model):
            assert model.layers[0].base.weight.equal(plain.layers[0].base.weight)

    for place in Interrupter("/hf_memopt/weights/", "/hf_memopt/transfer/").at_places(read, 60):
        with base.stream():
            assert base.report().device_bytes == 0, place
            assert model(ids()).equal(plain(ids())), place


class Mergeable(nn.Module):
    """Has a base layer and can merge into it, as PEFT's layers do."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)

    def merge(self) -> None: ...


def of_all_kinds() -> nn.Sequential:
    """Return a model that has each mark of streamed weights: hooks, derived classes, other methods."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0).requires_grad_(False)
    mergeable = Mergeable(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), encoder, mergeable)


def marks_of(model: nn.Module) -> list[Any]:
    """Return the classes, attributes and hooks of modules and tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    objects = [*model.modules(), *tensors]
    hooks = [[*each] for module in model.modules() for each in vars(module).values() if isinstance(each, dict)]
    kinds = [(type(each), {**vars(each)}.keys()) for each in objects]
    return [kinds, hooks, [(each.device, each.requires_grad) for each in tensors]]


def pooled_loss(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(0))).square().mean()


@pytest.mark.sweep(share=1 / 2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("home", ["host", "file"])
def test_an_interrupted_constructor_leaves_the_model_as_it_was(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        found = make_home(*args)
        homes.append(weakref.ref(found))
        return found

    monkeypatch.setattr("hf_memopt.weights.base.make_home", noted)
    interrupter = Interrupter("/weights/base.py", "/weights/homes.py", "/weights/residency/", "/transfer/")
    model, plain = of_all_kinds(), of_all_kinds()
    made: list[StreamedWeights] = []

    def construct() -> None:
        made.append(streamed(model, home=home, disk=tmp_path))

    for _ in range(2):  # the first call fills caches
        interrupter.call(construct)
        made.pop().remove()
    before = marks_of(model)
    for place in interrupter.at_places(construct, 60, num_warm_ups=0):
        assert not made, place
        assert marks_of(model) == before, place
        assert same([*model.parameters()], [*plain.parameters()]), place
    gc.collect()
    assert len(homes) > 20
    assert not any(each() for each in homes)
    assert same(train(model, pooled_loss, streamed(model)), train(plain, pooled_loss))


def test_a_with_statement_knows_whether_it_is_run() -> None:
    found: list[WithStatement] = []

    @contextmanager
    def noted() -> Iterator[None]:
        found.append(WithStatement.of_caller())
        yield

    def nested() -> bool:
        return found[0].may_be_running()

    with noted():
        assert nested()
        if found:  # a block of its own
            with noted():
                assert nested()
        try:
            assert nested()
        finally:
            assert nested()
    assert not nested()
    found.clear()
    with ExitStack() as stack:
        stack.enter_context(noted())
        assert nested()
