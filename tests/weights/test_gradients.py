"""Tests of gradients that live at home: whoever reads or writes `p.grad` finds what plain gradients would show."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from optimizer_toys import MAKERS, equal
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from trained_toys import Training, are_equal, gradients, network

from hf_memopt.weights.gradients import AwayGradient, Gradients

Model = nn.Module


def of_norm(model: Model, kind: float = 2.0, **options: Any) -> Any:
    return clip_grad_norm_(model.parameters(), 0.05, kind, **options)


def replaced(model: Model) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad = each.grad * torch.tensor(0.3)


def each_of(act: Callable[[Tensor], Any]) -> Callable[[Model], list[Any]]:
    return lambda model: [act(each) for each in gradients(model)]


def saved(gradient: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=False)
    return found


def written_through_a_view(gradient: Tensor) -> None:
    gradient.view(-1)[0] = 7.0
    gradient.detach().view(-1)[1] = 8.0


def unscaled(model: Model) -> Tensor:
    found, scale = torch.zeros(1), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients(model)), found, scale)
    return found


# By name: a use of gradients, and whether it is done without their bytes.
USES: dict[str, tuple[Callable[[Model], Any], bool]] = {
    "clipping": (of_norm, True),
    "clipping, foreach": (lambda model: of_norm(model, foreach=True), True),
    "clipping, not foreach": (lambda model: of_norm(model, foreach=False), True),
    "clipping twice": (lambda model: [of_norm(model), of_norm(model)], False),
    "clipping, largest": (lambda model: of_norm(model, float("inf")), False),
    "clipping, 1-norm": (lambda model: of_norm(model, 1), False),
    "clipping by value": (lambda model: clip_grad_value_(model.parameters(), 1e-3), False),
    "clipping by value, foreach": (lambda model: clip_grad_value_(model.parameters(), 1e-3, foreach=True), False),
    "total norm": (lambda model: get_total_norm(list(gradients(model)), error_if_nonfinite=True), True),
    "accelerate": (lambda model: Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.05), True),
    "norms by hand": (each_of(lambda gradient: gradient.norm()), True),
    "norms of data": (each_of(lambda gradient: gradient.data.norm(2)), True),
    "norms in float64": (each_of(lambda gradient: gradient.detach().double().norm()), False),
    "norms of rows": (each_of(lambda gradient: gradient.norm(dim=0)), False),
    "foreach norms": (lambda model: torch._foreach_norm(list(gradients(model))), True),
    "scaled": (each_of(lambda gradient: gradient.mul_(1 / 7)), True),
    "divided": (each_of(lambda gradient: gradient.div_(torch.tensor(7.0))), True),
    "foreach scaled": (lambda model: torch._foreach_mul_(list(gradients(model)), 0.3), True),
    "scaled and read": (lambda model: [each.mul_(0.5).sum() for each in gradients(model)], False),
    "scaled apart": (lambda model: torch._foreach_mul_(found := list(gradients(model)), [0.3] * len(found)), False),
    "replaced": (replaced, False),
    "noise added": (each_of(lambda gradient: gradient.add_(torch.ones(()))), False),
    "zeroed": (each_of(lambda gradient: gradient.zero_()), False),
    "foreach zeroed": (lambda model: torch._foreach_zero_(list(gradients(model))), False),
    "copied to": (each_of(lambda gradient: gradient.copy_(torch.full_like(gradient, 0.1))), False),
    "unscaled": (unscaled, False),
    "as one vector": (lambda model: parameters_to_vector(gradients(model)), False),
    "histograms": (each_of(lambda gradient: gradient.histc(4, -1, 1)), False),
    "arrays": (each_of(lambda gradient: torch.from_numpy(gradient.cpu().numpy()).clone()), False),
    "written array": (each_of(lambda gradient: gradient.numpy().fill(0.25)), False),
    "dlpack": (each_of(lambda gradient: torch.from_dlpack(gradient).clone()), False),
    "written through a view": (each_of(written_through_a_view), False),
    "clipped behind a view": (lambda model: [(each.view(-1), each.mul_(0.5))[0] for each in gradients(model)], False),
    "data exchanged": (each_of(lambda gradient: setattr(gradient, "data", gradient.data.clamp(-1e-4, 1e-4))), False),
    "parts by offset": (each_of(lambda each: each.as_strided((4,), (2,), each.storage_offset()).clone()), False),
    "diagonals": (each_of(lambda gradient: gradient.fill_diagonal_(0) if gradient.dim() == 2 else None), False),
    "written by index": (each_of(lambda gradient: gradient.__setitem__(0, 0.5)), False),
    "lists": (each_of(lambda gradient: gradient.tolist()), False),
    "texts": (each_of(repr), False),
    "items": (each_of(lambda gradient: gradient.sum().item()), False),
    "copies": (each_of(copy.deepcopy), False),
    "saved": (each_of(saved), False),
    "finite": (each_of(lambda gradient: bool(torch.isfinite(gradient).all())), False),
    "shapes": (each_of(lambda gradient: [gradient.shape, gradient.dtype, gradient.stride(), gradient.device]), True),
}


def gradients_of(training: Training) -> Gradients:
    assert training.weights is not None
    found = training.weights._gradients
    assert found is not None
    return found


@pytest.mark.sweep(share=0.2)
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("use", USES)
def test_a_use_of_gradients_finds_plain_ones(use: str, home: str, tmp_path: Path) -> None:
    act, needs_no_bytes = USES[use]

    def run(home: str) -> list[Any]:
        training = Training(network(), home, max_norm=None).start(**({"disk": tmp_path} if home else {}))
        training.backward(0)
        if home:
            gradients_of(training).settle()
            before = gradients_of(training).bytes_read
        found = act(training.model)
        if home and needs_no_bytes:
            assert gradients_of(training).bytes_read == before
        training.backward(1)  # adds to them
        shown = [each.clone() for each in gradients(training.model)]
        training.optimizer.step()
        return [found if not isinstance(found, AwayGradient) else found.clone(), shown, *training.results()]

    def compared(found: list[Any]) -> list[Any]:
        return [each.clone() if isinstance(each, Tensor) else each for each in found]

    got, want = run(home), run("")
    assert equal(compared(got[1:]), compared(want[1:]))
    assert equal(got[0], want[0])


def test_gradients_are_written_once_and_read_once_by_each_update(tmp_path: Path) -> None:
    training = Training(network(), "file").start(disk=tmp_path)
    found = gradients_of(training)
    training.update(0)
    moved = sum(each.nbytes for name, each in training.model.named_parameters() if has_home(training, each))
    assert found.bytes_written == 2 * moved  # in two micro-batches
    assert found.bytes_read <= 2 * moved  # a gradient that is still on its way is not read back
    assert all(each.grad is None for each in training.model.parameters())


def has_home(training: Training, parameter: nn.Parameter) -> bool:
    slot = gradients_of(training)._slots[id(parameter)]
    return slot.has_home and slot.parameter is not training.model.unused.weight


def test_a_gradient_that_is_kept_outlives_the_next_one(tmp_path: Path) -> None:
    training = Training(network(), "file", max_norm=None).start(disk=tmp_path)
    plain = Training(network(), max_norm=None).start()
    kept = []
    for each in (training, plain):
        each.backward(0)
        kept.append(list(gradients(each.model)))
        each.optimizer.zero_grad()
        each.backward(1)
    assert equal([each.clone() for each in kept[0]], kept[1])
    places = gradients_of(training).home.file.space.bytes_live
    kept.clear()
    training.optimizer.zero_grad()
    training.backward(2)
    assert gradients_of(training).home.file.space.bytes_live == places  # the second places are used again


def test_the_first_gradient_keeps_its_negative_zeros() -> None:
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    training = Training(layer, "host", max_norm=None).start()
    assert training.weights is not None
    with training.weights.stream():
        loss = (layer(torch.full((1, 64), -0.0)) * 1.0).sum()
    loss.backward()
    assert torch.signbit(layer[0].weight.grad.clone()).all()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    training = Training(nn.Sequential(nn.Embedding(200, 64, sparse=True), nn.Linear(64, 200)), "host").start()
    with pytest.raises(ValueError, match=r"gradient of trained weight '0.weight' is sparse.*sparse=False"):
        training.backward(0)


def test_memory_of_a_gradient_is_not_shared_with_processes() -> None:
    training = Training(network(), "host").start()
    training.backward(0)
    with pytest.raises(RuntimeError, match=r"gradient of 'table.weight' cannot be shared.*share its clone\(\)"):
        training.model.table.weight.grad.share_memory_()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_that_record_a_graph_stay_plain() -> None:
    training = Training(network(), "host").start()
    assert training.weights is not None
    with training.weights.stream():
        loss = training.loss_of(training.model, 0, False)
    loss.backward(create_graph=True)
    assert all(type(each) is Tensor and each.requires_grad for each in gradients(training.model))


def test_gradients_that_others_hold_stay_theirs() -> None:
    def run(home: str) -> list[Any]:
        model = network()
        weights = [each for each in model.parameters() if each is not model.unused.weight]
        flat, kept, place = torch.zeros(sum(each.numel() for each in weights)), [], 0
        for each in weights[:-3]:  # as gradients in buckets are
            each.grad = flat[place : place + each.numel()].view_as(each)
            place += each.numel()
        weights[-3].register_post_accumulate_grad_hook(lambda each: kept.append(each.grad))
        training = Training(model, home, max_norm=None).start()
        for number in range(2):
            training.backward(number)
            flat.mul_(0.5)
            kept.pop().mul_(0.5)
            training.optimizer.step()
            flat.zero_()
        return [flat, *training.results()]

    assert equal(run("host"), run(""))


def test_views_keep_a_gradient_as_long_as_they_live(tmp_path: Path) -> None:
    training = Training(network(), "file").start(disk=tmp_path)
    training.backward(0)
    kept = training.model.back.weight.grad.view(-1)
    largest = [each.flatten().abs().max() for each in gradients(training.model)]
    assert len(largest) > 5
    found = gradients_of(training)
    found.settle()
    here = [each for each in training.model.parameters() if each.grad is not None and _is_here(each)]
    assert [each is training.model.back.weight for each in here if found._slots[id(each)].has_home] == [True]
    kept.fill_(2.0)
    del kept
    found.settle()
    assert not _is_here(training.model.back.weight)
    assert torch.equal(training.model.back.weight.grad.clone(), torch.full_like(training.model.back.weight, 2.0))


def _is_here(parameter: nn.Parameter) -> bool:
    assert isinstance(parameter.grad, AwayGradient)
    return parameter.grad.gradient.value is not None


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_model_that_is_dropped_is_freed_with_its_gradients(home: str, tmp_path: Path) -> None:
    training = Training(network(), home).start(disk=tmp_path).run(1)
    training.backward(1)
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None


class Writes(torch.optim.SGD):
    """Writes gradients in a way that torch does not count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.data.add_(each.data, alpha=0.1)
        return torch.optim.SGD.step.__wrapped__(self, closure)  # type: ignore[attr-defined]


def test_an_optimizer_may_write_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "writes", lambda each: Writes(each, 0.1))

    def run(home: str) -> Training:
        training = Training(network(), home, kind="writes", max_norm=None).start()
        for number in range(3):  # which nothing sets to zero
            training.backward(number)
            training.optimizer.step()
        return training

    assert are_equal(run("file"), run(""))
