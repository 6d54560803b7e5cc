"""Tests of streamed weights under interrupts at any moment."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from adversarial_copier import AdversarialCopier
from frozen_bases import adapted, ids, same, square_loss, streamed, train, trainable
from interrupts import Interrupter, leave_contexts_of_torch

from hf_memopt.weights.residency.with_statement import WithStatement


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
