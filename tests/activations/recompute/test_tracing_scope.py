"""Tests that a dispatch mode is on in the chosen modules' own forwards, and off in submodules and outside."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.activations.recompute.op_tracer import active_in


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class Outer(nn.Module):
    """A module that computes exp, its children's cos, and sin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.listed = nn.ModuleList([Inner()])

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0](self.inner(x.exp())).sin()


def test_only_what_a_module_computes_itself_is_seen() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer], everywhere=False):
        outer(torch.ones(2)).tanh()
    assert mode.seen == ["exp", "sin"]


def test_submodules_can_be_chosen_as_well() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer, outer.inner], everywhere=False):
        outer(torch.ones(2)).tanh()
    assert mode.seen == ["exp", "cos", "sin"]


def test_a_submodule_alone() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer.inner], everywhere=False):
        outer(torch.ones(2)).tanh()
    assert mode.seen == ["cos"]


def test_everywhere_is_also_outside_of_calls_and_in_modules_that_nobody_chose() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer], everywhere=True):
        Inner()(outer(torch.ones(2))).tanh()
    assert mode.seen == ["ones", "exp", "sin", "cos", "tanh"]


def test_nothing_is_left_when_it_is_over() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer], everywhere=False):
        pass
    outer(torch.ones(2))
    assert mode.seen == []
    for module in outer.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_an_error_inside_of_a_module_turns_it_off() -> None:
    outer, mode = Outer(), Names()
    with active_in(mode, [outer], everywhere=False):
        with pytest.raises(AttributeError):
            outer("no tensor")
        torch.ones(2).tanh()
        assert mode.seen == []
        outer(torch.ones(2))
    assert mode.seen == ["exp", "sin"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_module_that_is_at_work_already_is_left_as_it_was_entered() -> None:
    """Check a module that is entered already: its own call has no hooks, and its next submodules do."""
    mode = Names()

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            self.scope = active_in(mode, [self, self.inner], everywhere=False)
            self.scope.__enter__()
            return self.inner(x).sin()

    late = Late()
    late(torch.ones(2)).tanh()
    late.scope.__exit__(None, None, None)
    assert mode.seen == ["cos"]
