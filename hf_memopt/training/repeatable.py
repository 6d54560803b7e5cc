"""Doing the same computation twice: random numbers and buffers as they were."""

import random
from typing import Any

import torch
from torch import Tensor, nn


class RandomState:
    """The state of Python's and torch's generators, the CPU's and the current device's, when this was made.

    NumPy's is not among them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        self._accelerator: Tensor | None = None
        if device.type != "cpu":
            self._accelerator = _module_of(device).get_rng_state()

    def restore(self) -> None:
        """Draw the same numbers again from here on."""
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            _module_of(self._device).set_rng_state(self._accelerator)


class BufferState:
    """Copies of a model's buffers, such as the running statistics that a forward pass changes."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Write the copies back into the buffers."""
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
