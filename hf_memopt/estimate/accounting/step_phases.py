"""Which part of a training step is running, and in which module, without the program's help."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

SETUP, FORWARD, BACKWARD, OUTSIDE, OPTIMIZER = "setup", "forward", "backward", "outside", "optimizer"


class Phases:
    """Follows a step through torch's global hooks.

    Forward lasts from the beginning of a step, or from a module's call, until backward begins; what comes between
    backward and the optimizer, or after it (clipping, averaging), is "outside".

    Attributes:
        name: of the running phase.
        module: full name of the innermost running module; "" outside of modules.
    """

    def __init__(self) -> None:
        self.name = SETUP
        self._running: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []

    @property
    def module(self) -> str:
        return self._running[-1] if self._running else ""

    def add_root(self, module: nn.Module, prefix: str = "") -> None:
        """Names a module and all in it; what is known already keeps its name."""
        self._roots.append(module)  # keeps ids from being reused
        for name, child in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(id(child), full or type(module).__name__)

    def begin_step(self) -> None:
        self.name = FORWARD

    def observe(self) -> bool:
        """Called before each operation, because backward begins and ends without telling; whether it begins here."""
        if self.name == OPTIMIZER:
            return False
        before = self.name
        if torch._C._current_graph_task_id() != -1:
            self.name = BACKWARD
        elif self.name == BACKWARD:
            self.name = OUTSIDE
        return self.name == BACKWARD != before

    @contextmanager
    def following(
        self, on_new_root: Callable[[nn.Module], None], on_optimizer: Callable[[Optimizer, bool], None]
    ) -> Iterator[None]:
        """While the context is open, phases and modules are followed.

        Args:
            on_new_root: called with a module that runs and belongs to no root so far.
            on_optimizer: called with an optimizer and whether its step is over, before and after each step.
        """

        def enter(module: nn.Module, inputs: Any) -> None:
            if id(module) not in self._names:
                on_new_root(module)
            self._running.append(self._names[id(module)])
            if self.name in (BACKWARD, OUTSIDE) and torch._C._current_graph_task_id() == -1:
                self.name = FORWARD

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._running.pop()

        def begin_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            on_optimizer(optimizer, False)
            self.name = OPTIMIZER

        def end_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            on_optimizer(optimizer, True)
            self.name = OUTSIDE

        handles: Iterable[Any] = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(begin_update),
            register_optimizer_step_post_hook(end_update),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
