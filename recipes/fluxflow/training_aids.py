"""Around the steps of `train_fluxflow.py`: the allocator's segments, the average of weights, several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from torch import nn

from hf_memopt.recipes.fluxflow.options import Options

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old one
EXPANDABLE = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Ask CUDA's allocator for segments that grow, through the environment, which it reads when CUDA starts."""
    given = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ}
    if any(EXPANDABLE in value for value in given.values()):
        return
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"expandable_segments=True: {name}={value!r} is set already; add {EXPANDABLE!r}, or unset it")
    if torch.cuda.is_initialized():
        raise ValueError(
            "expandable_segments=True: CUDA has started already, and its allocator has read its settings; set "
            f"{ALLOCATOR_SETTINGS[0]}={EXPANDABLE} in the environment before the start"
        )
    os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE


class WeightAverage:
    """Exponential moving average of a model's weights: diffusers' `EMAModel`, on the device or in host memory.

    The n-th update keeps a share of (1 + n) / (10 + n) of it, `decay` at most. On another device than the model's, an
    update copies all weights there and waits.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._ema = EMAModel(model.parameters(), decay=decay, foreach=True)
        self._ema.to(device)

    def step(self) -> None:
        # A copy requires no gradient, and EMAModel averages only weights that do.
        self._ema.step([p.detach().to(self._device).requires_grad_(p.requires_grad) for p in self._model.parameters()])

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._ema.store(self._model.parameters())
        self._ema.copy_to(self._model.parameters())
        try:
            yield
        finally:
            self._ema.restore(self._model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return self._ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ema.load_state_dict(state)
        self._ema.to(self._device)


def make_average(model: nn.Module, options: Options, device: torch.device) -> WeightAverage | None:
    home = torch.device("cpu") if options.levers.ema_on_cpu else device
    return WeightAverage(model, options.training.ema_decay, home) if options.training.ema_decay else None


def average_gradients(accelerator: Accelerator, parameters: list[nn.Parameter]) -> None:
    """Average gradients over processes, all in one exchange, which takes a copy of them."""
    if accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    everything = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
    for gradient, mean in zip(gradients, everything.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def save_vae(vae: Any, average: WeightAverage | None, folder: Path) -> None:
    """Write folders for `AutoencoderKL.from_pretrained`: `vae`, as trained, and `vae_ema`, the average of weights."""
    vae.save_pretrained(folder / "vae")
    if average is not None:
        with average.applied():
            vae.save_pretrained(folder / "vae_ema")
