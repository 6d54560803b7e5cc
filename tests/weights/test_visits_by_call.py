import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn

from hf_memopt import OffloadedTeacher, SyncCopier
from hf_memopt.weights import VisitsByCall

SIZE = 64  # so that a bias fills 256 bytes, to which packed weights are aligned
NUM_LAYERS = 4
NUM_BYTES = 4 * NUM_LAYERS * (SIZE * SIZE + SIZE)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, SIZE)


def on_the_host(module: nn.Module, mode: str) -> VisitsByCall:
    budget = 0.0 if mode == "stream" else None
    return VisitsByCall(OffloadedTeacher(module, device="cpu", mode=mode, budget_gib=budget, copier=SyncCopier()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_each_call_is_a_visit(
    mode: str, context: Callable[[], AbstractContextManager[None]], module: nn.Module, x: Tensor
) -> None:
    want = copy.deepcopy(module)(x)
    visits = on_the_host(module, mode)
    for number in range(1, 4):
        with context():
            assert torch.equal(module(x), want)
        report = visits.teacher.report()
        assert report.bytes_host_to_device == number * NUM_BYTES
    assert report.peak_device_bytes <= (NUM_BYTES if mode == "swap" else NUM_BYTES // 2)
    with torch.no_grad():
        assert torch.equal(module(x), want)


def test_under_the_adversarial_copier(module: nn.Module, x: Tensor) -> None:
    want = copy.deepcopy(module)(x)
    VisitsByCall(OffloadedTeacher(module, device="cpu", mode="swap", copier=AdversarialCopier("late")))
    for _ in range(3):
        assert torch.equal(module(x), want)


@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_an_exception_ends_the_visit(mode: str, module: nn.Module, x: Tensor) -> None:
    want = copy.deepcopy(module)(x)
    visits = on_the_host(module, mode)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(x[:, 1:])
        # The first visit did not stay open.
        before = visits.teacher.report().bytes_host_to_device
        assert torch.equal(module(x), want)
        assert visits.teacher.report().bytes_host_to_device == before + NUM_BYTES


def test_a_copy_that_fails_leaves_no_visit_behind(
    module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = copy.deepcopy(module)(x)
    visits = on_the_host(module, "swap")
    with monkeypatch.context() as patch:
        patch.setattr(visits.teacher._copier, "to_device", lambda *arguments: pytest.fail("no memory"))
        with pytest.raises(pytest.fail.Exception, match="no memory"):
            module(x)
    assert torch.equal(module(x), want)
    assert visits.teacher.report().bytes_host_to_device == NUM_BYTES


def test_a_call_within_a_call_is_the_same_visit(module: nn.Module, x: Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = module

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            return self.body(self(x, depth - 1) if depth else x)

    twice = Twice()
    want = twice(x)
    visits = on_the_host(twice, "swap")
    assert torch.equal(twice(x), want)
    assert visits.teacher.report().bytes_host_to_device == NUM_BYTES


def test_the_modules_own_forward_is_restored(module: nn.Module, x: Tensor) -> None:
    want = copy.deepcopy(module)(x)
    on_the_host(module, "swap").remove()
    assert "forward" not in vars(module)
    assert torch.equal(module(x), want)


def test_a_forward_that_was_replaced_before_is_called_and_restored(module: nn.Module, x: Tensor) -> None:
    want, plain = copy.deepcopy(module)(x), module.forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * plain(x)

    module.forward = doubled
    visits = on_the_host(module, "swap")
    assert torch.equal(module(x), 2 * want)
    assert visits.teacher.report().bytes_host_to_device == NUM_BYTES
    visits.remove()
    assert module.forward is doubled
