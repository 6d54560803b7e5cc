"""Tests of code outside of the model: visits, copies and states of streamed weights, and other threads."""

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversarial_copier import AdversarialCopier
from frozen_bases import LAYER_BYTES, ROWS, WIDTH, adapted, ids, same, square_loss, streamed, train, trainable
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hf_memopt import StreamedWeights


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.4)
def test_threads_may_share_a_model(home: str, autocast: bool, tmp_path: Path) -> None:
    plain, model = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)

    def gradients(of: nn.Module, seed: int) -> list[Tensor]:
        tokens = ids(seed=seed % 5)
        precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        if seed % 3 == 0:
            with torch.no_grad(), precision:
                return [of(tokens)]
        with precision:
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


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: torch._foreach_copy_([weight.data], [torch.ones(WIDTH, WIDTH)]),
        lambda weight: setattr(weight, "data", weight.data * 2),
    ],
    ids=["itself", "data", "detached", "foreach", "bound"],
)
@pytest.mark.parametrize("where", ["visit", "forward", "pass"])
@pytest.mark.sweep(share=0.15)
def test_a_write_is_an_error(write: Callable[[nn.Parameter], object], where: str, home: str, tmp_path: Path) -> None:
    model = adapted()
    base = streamed(model, home=home, disk=tmp_path)
    layer, want = model.layers[0].base, adapted().layers[0].base.weight

    def run() -> None:
        if where == "visit":
            with base.visit(layer):
                write(layer.weight)
        elif where == "pass":
            with base.stream():
                write(layer.weight)
        else:
            model(ids())
        with base.stream():
            pass

    if where == "forward":
        layer.register_forward_pre_hook(lambda module, args: (write(module.weight), None)[1])
    with pytest.raises(RuntimeError, match=r"layers\.0\.base\.weight' was written"), torch.no_grad():
        run()
    base.remove()
    with torch.no_grad():
        write(want)
    assert torch.equal(layer.weight, want)


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_write_of_a_state_dict_is_an_error(home: str, tmp_path: Path) -> None:
    model = adapted()
    base = streamed(model, home=home, disk=tmp_path)
    with torch.inference_mode():
        state = model.state_dict()
    with base.stream():
        pass
    for value in state.values():
        value.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"table\.weight' was written"), base.stream():
        pass


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.untyped_storage().resize_(100_000),
        lambda weight: weight.untyped_storage().resize_(0),
        lambda weight: weight.share_memory_(),
    ],
    ids=["longer", "empty", "shared"],
)
def test_memory_that_was_exchanged_is_brought_again_or_an_error(
    change: Callable[[nn.Parameter], object], home: str, tmp_path: Path
) -> None:
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)
    with base.visit(model):
        change(model.layers[0].base.weight)
    with nullcontext() if home == "host" else pytest.raises(RuntimeError, match=r"layers\.0.*its memory was exchanged"):
        for _ in range(2):
            with base.stream():
                assert torch.equal(model(ids()), plain(ids()))


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize(
    "array_of",
    [lambda weight: weight.numpy(), lambda weight: weight.detach().numpy(), np.asarray, torch.from_dlpack],
    ids=["numpy", "detached", "asarray", "dlpack"],
)
@pytest.mark.parametrize("where", ["visit", "stream", "forward"])
@pytest.mark.sweep(share=0.15)
def test_arrays_keep_the_memory_that_they_read(
    array_of: Callable[[Any], Any], where: str, home: str, tmp_path: Path
) -> None:
    if where != "visit" and array_of is torch.from_dlpack:
        pytest.skip("what a graph holds looks the same")
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)
    layer, found = model.layers[0].base, []
    for _ in range(2):
        found.clear()
        if where == "visit":
            with base.visit(model):
                found.append(array_of(layer.weight))
        elif where == "stream":
            with base.stream():
                found.append(array_of(layer.weight))
        else:
            hook = layer.register_forward_hook(lambda module, args, output: found.append(array_of(module.weight)))
            with base.stream():
                model(ids())
            hook.remove()
        others = [torch.full((WIDTH, WIDTH), 7.0) for _ in range(20)]
        for _ in range(2):
            with base.stream(), torch.no_grad():
                assert torch.equal(model(ids()), plain(ids()))
        assert np.array_equal(np.asarray(found[0]), plain.layers[0].base.weight.numpy())
        assert base.report().device_bytes == LAYER_BYTES
        del others
    found.clear()
    with base.stream():
        assert base.report().device_bytes == 0


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("home", ["host", "file"])
def test_a_write_by_an_array_is_an_error(is_kept: bool, home: str, tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)
    layer, found = model.layers[0].base, []

    def write() -> None:
        with base.visit(layer):
            array = layer.weight.numpy()
            array[0] = 1
            if is_kept:
                found.append(array)
            del array
        found.clear()
        for _ in range(2):
            with base.stream():
                model(ids())

    with pytest.raises(RuntimeError, match=r"layers\.0\.base\.weight' was written"):
        write()
    base.remove()
    plain.layers[0].base.weight.numpy()[0] = 1
    assert torch.equal(model(ids()), plain(ids()))


@pytest.mark.parametrize("home", ["host", "file"])
def test_nothing_is_left_of_reads_on_threads_and_of_older_graphs(home: str, tmp_path: Path) -> None:
    model = adapted()
    output = model(ids())
    base = streamed(model, home=home, disk=tmp_path)
    layer = model.layers[0].base
    hook = model.layers[1].register_forward_hook(lambda *given: layer.weight.norm())
    thread = threading.Thread(target=lambda: model(ids()))
    thread.start()
    thread.join()
    hook.remove()
    with base.visit(layer):
        layer.weight.numpy().sum()
    del output
    for _ in range(2):
        with base.stream():
            assert base.report().device_bytes == 0


@pytest.mark.parametrize("home", ["host", "file"])
def test_weights_look_like_parameters_in_a_visit(home: str, tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)
    weight, want = model.layers[0].base.weight, plain.layers[0].base.weight
    with base.visit(model):
        for made in (nn.Parameter(weight), nn.Parameter(weight.data.clone()), copy.deepcopy(weight)):
            assert isinstance(made, nn.Parameter)
            assert torch.equal(made, want)
        assert not isinstance(weight.detach(), nn.Parameter)
        assert type(copy.deepcopy(weight)) is nn.Parameter
        file = io.BytesIO()
        torch.save(weight, file)
        with pytest.raises(TypeError, match="cannot be pickled while"):
            torch.save(model, io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), want)
    base.remove()
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_thread_reads_what_another_one_has_there(home: str, tmp_path: Path) -> None:
    """While a call of one thread waits, another thread reads the weight of that call, and goes on when it is over."""
    model, plain = adapted(), adapted()
    base = streamed(model, home=home, disk=tmp_path)
    layer, in_call, is_read = model.layers[0].base, threading.Event(), threading.Event()

    def wait(*args: object) -> None:
        in_call.set()
        assert is_read.wait(60)

    def call() -> None:
        with base.stream(), torch.no_grad():
            model(ids())

    hook = layer.register_forward_pre_hook(wait)
    thread = threading.Thread(target=call)
    thread.start()
    assert in_call.wait(60)
    with base.stream("norms"), torch.no_grad():
        alias = layer.weight.detach()
        is_read.set()
        thread.join()
        hook.remove()
        assert torch.equal(alias, plain.layers[0].base.weight)
        assert torch.equal(layer.weight.norm(), plain.layers[0].base.weight.norm())
        del alias
    for _ in range(2):
        with base.stream():
            assert base.report().device_bytes == 0
            assert torch.equal(model(ids()), plain(ids()))
