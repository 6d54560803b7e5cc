"""A module whose every forward is offloaded."""

import functools
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

from torch import nn


class Offloads(Protocol):
    def offload_context(self, model: nn.Module | None = None) -> AbstractContextManager[Any]: ...


class WrappedModule:
    """A module whose forwards run in an `offload_context` each."""

    def __init__(self, model: nn.Module, offloader: Offloads) -> None:
        self.offloader = offloader
        # Of the calls at work; None where entering the context failed.
        self._entered: list[AbstractContextManager[Any] | None] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            # Also after an exception, or the hooks would go on packing the code after it.
            model.register_forward_hook(self._exit, always_call=True),
        ]

    @property
    def is_running(self) -> bool:
        """Return whether a forward of the module is at work."""
        return bool(self._entered)

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, model: nn.Module, inputs: Any) -> None:
        self._entered.append(None)
        context = self.offloader.offload_context(model)
        context.__enter__()
        self._entered[-1] = context

    def _exit(self, model: nn.Module, inputs: Any, output: Any) -> None:
        context = self._entered.pop()
        if context is not None:
            context.__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entered": []}


def hook_direct_calls(model: nn.Module) -> None:
    """Make calls of a wrapped module's `forward` itself, as in lerobot's loop, run its hooks, too."""
    forward: Any = model.forward
    if getattr(forward, "__self__", None) is not model:
        return
    function = forward.__func__

    # A method, which copies of the module have bound to themselves.
    @functools.wraps(function)
    def hooked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrapped = wrapped_module(self)
        if wrapped is None or wrapped.is_running:
            return function(self, *args, **kwargs)
        return self(*args, **kwargs)

    model.forward = MethodType(hooked, model)


def wrapped_module(model: nn.Module) -> WrappedModule | None:
    """Return the handle of a module that an offloader wraps; None, none does."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, WrappedModule)), None)
