"""Operations are noted, in a plan's steps, only inside the modules whose results are computed again."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from hf_memopt.activations.recompute.op_tracer import is_innermost


@contextmanager
def active_in(mode: TorchDispatchMode, modules: Collection[nn.Module], everywhere: bool) -> Iterator[None]:
    """Keep a mode, which slows operations down, active while one of `modules` is at work itself, not a submodule."""
    switch = _Switch(mode, everywhere)
    covered = {id(module) for module in modules}
    inner = {id(child): child for module in modules for child in _called_children(module)}
    handles = []
    try:
        for module in {**inner, **{id(module): module for module in modules}}.values():
            handles += switch.attach(module, id(module) in covered)
        with mode if everywhere else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def off_in_dual_levels(mode: TorchDispatchMode) -> Iterator[None]:
    """Keep a dispatch mode off inside of levels of forward-mode AD that are entered meanwhile.

    torch's formulas look whether there is any mode: those of layer norms then take another path, rounded otherwise. The
    two functions of `torch.autograd` that enter and leave levels are replaced.
    """
    enter_level, exit_level = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    left: list[bool] = []

    def enter() -> int:
        left.append(is_innermost(mode))
        if left[-1]:
            _pop_mode()
        level: int = enter_level()  # type: ignore[no-untyped-call]
        return level

    def leave(*, level: int | None = None) -> None:
        exit_level(level=level)  # type: ignore[no-untyped-call]
        if left and left.pop():
            _push_mode(mode)

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_level, exit_level


def in_dual_level() -> bool:
    return forward_ad._current_level >= 0


class _Switch:
    def __init__(self, mode: TorchDispatchMode, is_on: bool) -> None:
        self._mode = mode
        self._is_on = is_on
        # Ids of the modules at work, and whether the mode was on before.
        self._entered: list[tuple[int, bool]] = []

    def attach(self, module: nn.Module, is_covered: bool) -> "list[torch.utils.hooks.RemovableHandle]":
        def enter(module: nn.Module, inputs: object) -> None:
            self._entered.append((id(module), self._is_on))
            self._turn(is_covered and not in_dual_level())

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            # A module that was being called already when it got its hooks is left without having been entered.
            if self._entered and self._entered[-1][0] == id(module):
                self._turn(self._entered.pop()[1])

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _turn(self, on: bool) -> None:
        if on and not self._is_on:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True
        elif self._is_on and not on and is_innermost(self._mode):
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False


def _called_children(module: nn.Module) -> Iterable[nn.Module]:
    """Submodules that a module's own forward calls, but for compiled ones: hooks would make them compile again."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(child)
        elif child._compiled_call_impl is None and not hasattr(child, "_orig_mod"):
            yield child
