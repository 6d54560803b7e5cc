"""Tests of streamed weights under interrupts at any moment, on several threads, and read by code outside."""

import copy
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from frozen_bases import LAYER_BYTES, ROWS, WIDTH, adapted, ids, same, square_loss, streamed, train, trainable
from interrupts import Interrupter, leave_contexts_of_torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hf_memopt import StreamedWeights
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


@pytest.mark.parametrize("home", ["host", "file"])
def test_threads_may_share_a_model(home: str, tmp_path: Path) -> None:
    plain, model = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)

    def gradients(of: nn.Module, seed: int) -> list[Tensor]:
        tokens = ids(seed=seed % 5)
        if seed % 3 == 0:
            with torch.no_grad():
                return [of(tokens)]
        loss = of(tokens).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, trainable(of))]

    def streamed_gradients(seed: int) -> list[Tensor]:
        if seed % 2:  # a server calls the model without a pass
            return gradients(model, seed)
        with base.stream():
            return gradients(model, seed)

    want = [gradients(plain, seed) for seed in range(15)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(streamed_gradients, [*range(15)] * 6))
    assert all(same(mine, its) for mine, its in zip(found, want * 6, strict=True))
    with base.stream():
        assert base.report().device_bytes == 0


def test_evaluation_beside_training() -> None:
    plain, model = adapted(), adapted()
    with torch.no_grad():
        logits = plain(ids(seed=7))
    want = train(plain, square_loss, steps=6)
    base = streamed(model, copier=AdversarialCopier("early"))
    # Only the frozen part may be read while another thread trains the rest.
    frozen = nn.Sequential(model.table, *(layer.base for layer in model.layers), model.head)
    with torch.no_grad(), base.stream():
        expected = frozen(ids(seed=7))
    over, wrong = threading.Event(), []

    def evaluate() -> None:
        while not over.is_set():
            with torch.no_grad(), base.stream("evaluation"):
                if not torch.equal(frozen(ids(seed=7)), expected):
                    wrong.append(1)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        assert same(train(model, square_loss, base, steps=6), want)
    finally:
        over.set()
        thread.join()
    assert not wrong
    assert logits.isfinite().all()


def test_other_code_reads_weights_inside_of_a_visit() -> None:
    model, plain = adapted(), adapted()
    base = streamed(model, copier=AdversarialCopier("late"))
    weight = model.layers[0].base.weight
    average = AveragedModel(copy.deepcopy(plain))
    with pytest.raises(RuntimeError, match=r"'table\.weight' is away.*with base\.visit\(module\)"):
        average.update_parameters(model)
    with base.visit(model):
        average.update_parameters(model)
        assert torch.equal(weight.norm(), plain.layers[0].base.weight.norm())
        assert copy.deepcopy(weight).equal(weight)
    assert base.report().device_bytes == 0
    with base.stream(), base.visit(model.layers[1]):
        assert base.report().device_bytes == LAYER_BYTES
    train(model, square_loss, base, steps=2)
    # A visit of the whole model is none that a step needs.
    assert base.report().smallest_budget_bytes == ROWS * WIDTH * 4 + LAYER_BYTES
    with pytest.raises(RuntimeError, match="is away"):
        weight.sum()


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_copy_made_in_a_visit_has_a_state_of_its_own(home: str, tmp_path: Path) -> None:
    model = adapted()
    layer = model.layers[0].base
    base = streamed(model, home=home, disk=tmp_path)
    with base.visit(model):
        copied, want = copy.deepcopy(layer), layer.weight.clone()
    with torch.no_grad():
        copied.weight.add_(1)
    assert torch.equal(copied.state_dict()["weight"], want + 1)
    copied.load_state_dict({name: torch.zeros_like(each) for name, each in copied.state_dict().items()})
    assert not copied.weight.any()
    assert torch.equal(layer.state_dict()["weight"], want)


def test_memory_that_others_hold_is_reported() -> None:
    model = adapted()
    kept = model.layers[0].base.weight.detach()
    base = StreamedWeights(model, home="host", device="cpu")
    assert base.report().resident == {"held by tensors outside of the model": LAYER_BYTES}
    del kept
    assert base.report().resident == {}
