"""Plans for `train_fluxflow.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_memopt.recipes.common.auto_plan import BatchInParts, activation_levers, reading
from hf_memopt.recipes.common.flags import read_options
from hf_memopt.recipes.fluxflow.model import build_models, make_average
from hf_memopt.recipes.fluxflow.options import Options
from hf_memopt.recipes.fluxflow.step import Figures, Run, make_optimizers, step, weights_at

__all__ = ["workload"]


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "FluxFlow":
    """Return the workload of `train_fluxflow.py --config_path FILE`; `effective_batch` counts images."""
    return FluxFlow(read_options(Options, "", reading(config_path)), precision, effective_batch)


class FluxFlow(BatchInParts):
    """A VAE-GAN with the flags of its recipe. The simulated update has the R1 penalty, which needs most."""

    MODULE = "hf_memopt.recipes.train_fluxflow"
    packages = ("hf_memopt[fluxflow]",)
    LEVERS: ClassVar = {
        "activations": activation_levers("levers.checkpoint_vae"),
        "average": {"on the device": {"levers.ema_on_cpu": False}, "on the host": {"levers.ema_on_cpu": True}},
    }

    def __init__(self, options: Options, precision: str = "no", effective_batch: int | None = None) -> None:
        super().__init__(f"FluxFlow at {max(options.resolutions)}", options, precision, effective_batch)

    def setup(self, options: Options, precision: str) -> tuple[Run, Tensor]:
        accelerator = Accelerator(mixed_precision=precision)
        models = build_models(options.model, options.losses, options.levers, options.training.seed)
        for model in filter(None, models):
            model.to(accelerator.device)
        side = max(options.resolutions)
        shape = options.training.batch_size, models.vae.config.in_channels, side, side
        images = torch.zeros(shape, device=accelerator.device)
        average = make_average(models.vae, options, accelerator.device)
        optimizers = make_optimizers(models, options.training, accelerator)
        return Run(accelerator, options, models, optimizers, average=average), images

    def step(self, state: tuple[Run, Tensor]) -> Figures:
        run, images = state
        figures = step(run, images, weights_at(10**6, run.options.losses), with_r1=True)
        if run.average is not None:
            run.average.step()
        return figures
