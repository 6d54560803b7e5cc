"""Tests that the sweep over operations finds broken copies, wrong recomputation, and changed obstacles."""

from dataclasses import replace
from typing import Any

import offload_variants
import operation_runs
import pytest
import torch
from known_obstacles import NO_SECOND, faults_of
from offload_variants import COPIERS, STRATEGIES, Controls, Outcome, Variant, try_everything
from operation_cases import Case
from operation_runs import CHECKPOINTED, PLAIN, SETTINGS, Setting, run, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.transfer import SyncCopier


def a_case() -> Case:
    torch.manual_seed(0)
    return Case("sine of exp", lambda x: torch.sin(torch.exp(x)), [torch.randn(64, requires_grad=True)])


class ForgetfulCopier(SyncCopier):
    """A copier that brings zeros back."""

    def to_device(self, source: Tensor, destination: Tensor) -> object:
        return super().to_device(torch.zeros_like(source), destination)


def test_a_sound_offloader_has_no_faults() -> None:
    assert not faults_of([try_everything(a_case())], (), is_whole=True)


@pytest.mark.sweep(share=1 / 5)
@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        *((strategy, setting) for strategy in STRATEGIES for setting in SETTINGS),
        *(("inputs", setting) for setting in SETTINGS if setting.checkpointed),
    ],
    ids=str,
)
def test_wrong_bytes_from_the_host_are_found(strategy: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that every saved tensor has left the device before backward."""
    monkeypatch.setitem(COPIERS, "forgetful", lambda seed: ForgetfulCopier())
    case = a_case()
    expected = Controls(case).expected(setting)
    passes = [same(got, expected) for got in Variant(strategy, "forgetful", setting).passes(case)]
    assert not passes[0]
    assert strategy != "recompute or offload" or not any(passes)


class WrongExp(TorchDispatchMode):
    """A mode with zeros as exponentials, wrong in recomputation only: a plain backward computes no exponentials."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func is torch.ops.aten.exp.default else result


@pytest.mark.parametrize("plan", ["recompute or offload", "recompute or keep"])
def test_wrong_recomputation_is_found(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def grad_with_wrong_exp(*args: Any, **kwargs: Any) -> Any:
        with WrongExp():
            return torch.autograd.grad(*args, **kwargs)

    case = a_case()
    expected = Controls(case).expected(PLAIN)
    monkeypatch.setattr(operation_runs, "grad", grad_with_wrong_exp)
    assert same(run(case, PLAIN), expected)
    assert [same(got, expected) for got in Variant(plan, "sync").passes(case)] == [True, False, False, False]


def test_an_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_variants, "COPIERS", {"broken": lambda seed: 1 / 0})
    failures = try_everything(a_case()).failures
    assert all("ZeroDivisionError" in failure for failure in failures)
    assert len(failures) > len(SETTINGS)


def test_obstacles_are_neither_unknown_nor_gone() -> None:
    outcome = Outcome({"plain": "add: raises ValueError: no", "second": f"add: {NO_SECOND}"}, [])
    assert not faults_of([outcome], ("no",), is_whole=True)
    assert faults_of([outcome], (), is_whole=False)
    assert faults_of([outcome], ("no", "never"), is_whole=True)
    assert not faults_of([outcome], ("no", "never"), is_whole=False)


def test_what_cannot_be_repeated_is_an_obstacle() -> None:
    count = iter(range(100))
    case = replace(a_case(), function=lambda x: x * next(count))
    assert Controls(case).obstacle(PLAIN) == "two plain runs differ"


@pytest.mark.parametrize(
    ("first", "second", "are_same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), -torch.tensor([float("nan")]), True),
        (torch.eye(2).to_sparse(), torch.eye(2), False),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), True),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (None, torch.tensor([1.0]), False),
        (True, True, True),
    ],
)
def test_bits_are_compared(first: object, second: object, are_same: bool) -> None:
    assert same([first], [second]) == are_same


def looks_for_a_mode(x: Tensor) -> Tensor:
    """Compute differently inside a dispatch mode, as some of torch's own formulas do."""
    return torch.sin(x) if torch._C._len_torch_dispatch_stack() else torch.sinh(x)


def test_only_what_an_empty_dispatch_mode_changes_too_is_excused() -> None:
    torch.manual_seed(0)
    strange = Controls(Case("looks for a mode", looks_for_a_mode, [torch.randn(64, requires_grad=True)]))
    planned = Variant("recompute or keep", "sync", CHECKPOINTED)
    assert strange.excuse(planned) == "other bits inside an empty dispatch mode"
    assert not strange.excuse(replace(planned, setting=PLAIN))
    assert not strange.excuse(replace(planned, strategy="all"))
    assert not Controls(a_case()).excuse(planned)
