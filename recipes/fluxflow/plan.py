"""Plans for `train_fluxflow.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_memopt.recipes import train_fluxflow as recipe
from hf_memopt.recipes.causal_lm.model import make_offloader
from hf_memopt.recipes.common.auto_plan import Changes, RecipeWorkload
from hf_memopt.recipes.common.flags import read_flags
from hf_memopt.recipes.fluxflow.levers import make_average
from hf_memopt.recipes.fluxflow.losses import Figures, weights_at
from hf_memopt.recipes.fluxflow.model import build_models
from hf_memopt.recipes.fluxflow.options import Options
from hf_memopt.recipes.fluxflow.step import Gan, Optimizers, make_optimizers, step


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "FluxFlow":
    """The workload of a file of flags, as for `train_fluxflow.py @FILE`.

    Args:
        config_path: one flag per line.
        precision: "no", "bf16", or "auto" to try both.
        effective_batch: images per update; None, what the flags make it.
    """
    options = Options(*read_flags(Options.__annotations__.values(), recipe.__doc__, [f"@{config_path}"]))
    return FluxFlow(options, precision=precision, effective_batch=effective_batch)


class FluxFlow(RecipeWorkload):
    """A VAE-GAN with the flags of its recipe. The simulated update has the R1 penalty, which needs most."""

    MODULE = "hf_memopt.recipes.train_fluxflow"
    LEVERS: ClassVar = {
        "activations": {
            "kept": {"levers.checkpoint_vae": False, "offload.offload": "off"},
            "offloaded where free": {"levers.checkpoint_vae": False, "offload.offload": "auto"},
            "checkpointed": {"levers.checkpoint_vae": True, "offload.offload": "off"},
            "checkpointed, inputs offloaded": {"levers.checkpoint_vae": True, "offload.offload": "inputs"},
        },
        "average": {"on the device": {"levers.ema_on_cpu": False}, "on the host": {"levers.ema_on_cpu": True}},
    }

    def __init__(self, options: Options, *, precision: str = "no", effective_batch: int | None = None) -> None:
        batch = options.training.batch_size if effective_batch is None else effective_batch
        super().__init__(f"FluxFlow at {max(options.resolutions)}", options, batch, precision)

    def batching(self, micro_batch: int) -> Changes:
        parts = 0 if micro_batch == self.effective_batch else micro_batch
        return {"training.batch_size": self.effective_batch, "training.micro_batch_size": parts}

    def num_simulated(self, options: Options, accumulation: int) -> int:
        """All of them: they are parts of a batch that lies on the device as a whole."""
        return accumulation

    def setup(self, options: Options, precision: str) -> tuple[Gan, Tensor, Any]:
        training = options.training
        accelerator = Accelerator(mixed_precision=precision)
        models = build_models(options.model, options.losses, options.levers, training.seed)
        for model in filter(None, models):
            model.to(accelerator.device)
        optimizers = make_optimizers(models, training)
        gan = Gan(
            models,
            Optimizers(*map(accelerator.prepare_optimizer, optimizers)),
            options.losses,
            options.levers,
            micro_batch_size=training.micro_batch_size,
            max_grad_norm=training.max_grad_norm,
            autocast=accelerator.autocast,
            offloader=make_offloader(options.offload.offload, options.offload, accelerator.device),
        )
        side = max(options.resolutions)
        images = torch.zeros(training.batch_size, 3, side, side, device=accelerator.device)
        home = torch.device("cpu") if options.levers.ema_on_cpu else accelerator.device
        return gan, images, make_average(models.vae, training.ema_decay, home)

    def step(self, state: Any) -> Figures:
        gan, images, average = state
        figures = step(gan, images, weights_at(10**6, gan.losses), with_r1=True)
        if average is not None:
            average.step()
        return figures
