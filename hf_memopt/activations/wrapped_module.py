"""A module whose every forward is offloaded."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hf_memopt.activations.offloader import ActivationOffloader


class WrappedModule:
    """A module whose forwards run in an `offload_context`."""

    def __init__(self, offloader: "ActivationOffloader", model: nn.Module) -> None:
        self.offloader = offloader
        self._contexts: list[Any] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            # Also after an exception, or the hooks would go on packing whatever runs next.
            model.register_forward_hook(self._exit, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, model: nn.Module, inputs: Any) -> None:
        context = self.offloader.offload_context(model)
        context.__enter__()
        self._contexts.append(context)

    def _exit(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._contexts.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contexts": []}
