"""A module whose every forward is offloaded."""

from contextlib import AbstractContextManager
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
