"""One update of `train_lgt.py`, apart from its loop: model, optimizer and loss, and the state of a run.

But for the clipping and the check of gradients, nothing here waits for the device or decides by tensors' values, so
that it also runs on tensors without data.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hf_memopt.recipes.common import loop
from hf_memopt.recipes.lgt.data import Batch
from hf_memopt.recipes.lgt.losses import full_precision, self_similarity_difference, sliced_wasserstein
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.training import GradientCache, StepResult, train_step

Outputs = tuple[Tensor, ...]


def build_model(options: Options) -> LatentTransfer:
    training = options.training
    model = LatentTransfer(options.model, legacy_dt=training.legacy_dt, average_style=training.use_avg_style_for_uncond)
    model.checkpointing = training.use_gradient_checkpointing
    return model


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    training = options.training
    return torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)


class Objective:
    """The loss, and its components in the batches so far.

    `w_style * mean(style_weights) * SWD(output, target_latents) + w_content * SSM(output, latents)`, and with
    `use_velocity_reg` `vel_reg_weight` times the mean square of the velocity that integration starts with. The original
    computes that velocity in a forward pass of its own.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._num_steps = options.loss, options.training.ode_integration_steps
        self._seen: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.loss(*self.outputs(model, batch))

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the tensors that the loss is made of, samples first: they may be concatenated over batches."""
        moved, energy = model(batch["start"], batch["time"], batch["targets"], batch["dropped"], self._num_steps)
        return moved, energy, batch["latents"], batch["target_latents"], batch["style_weights"]

    def loss(self, moved: Tensor, energy: Tensor, latents: Tensor, target_latents: Tensor, weights: Tensor) -> Tensor:
        options = self._options
        sizes = {name: getattr(options, name) for name in ("patch_size", "num_projections", "max_samples")}
        swd = sliced_wasserstein(moved, target_latents, **sizes)
        ssm = self_similarity_difference(moved, latents, options.max_spatial_samples)
        with full_precision(moved):
            total = options.w_style * weights.mean() * swd + options.w_content * ssm
            terms = {"style_swd": swd, "content_ssm": ssm}
            if options.use_velocity_reg:
                terms["velocity"] = energy.mean()
                total = total + options.vel_reg_weight * terms["velocity"]
        # Copies: torch's mse_loss leaves the memory of all squares behind its mean, which a view would keep.
        self._seen.append({name: term.detach().clone() for name, term in {"loss": total, **terms}.items()})
        return total

    def take_means(self) -> dict[str, Tensor]:
        """Return means of the loss and each component over the batches since the last call, `()`, on the device."""
        seen, self._seen = self._seen, []
        return {name: torch.stack([terms[name] for terms in seen]).mean() for name in seen[0]} if seen else {}


@dataclass
class Progress(loop.Progress):
    epoch: int = 0  # how many are complete; each has an entry in the history
    num_windows: int = 0  # updates in the epoch that is not
    sums: dict[str, float] = field(default_factory=dict)  # of the losses in these
    seconds: float = 0.0  # that these took


@dataclass(kw_only=True)
class Run(loop.Run):
    average: AveragedModel | None  # of the weights
    bank: Any = None  # a LatentBank, whose row numbers `batches` holds; None where a step is only simulated
    held_out: Any = None  # Latents on the host
    progress: Progress = field(default_factory=Progress)
    memory_bytes: list[int] = field(default_factory=list)  # the most held up to the end of each epoch since the start

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective = Objective(self.options)

    # `train_step` and `GradientCache` call these two, which is where the offloader sees the forward pass.
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.saving():
            return self.objective(model, batch)

    def outputs(self, batch: Batch) -> Outputs:
        with self.saving():
            return self.objective.outputs(self.model, batch)

    def best_model(self) -> LatentTransfer:
        best = self.accelerator.unwrap_model(self.model) if self.average is None else self.average.module
        assert isinstance(best, LatentTransfer)
        return best


def update_weights(run: Run, micro_batches: list[Batch]) -> StepResult:
    """Update by the mean of the micro-batches' gradients, or with a gradient cache by that of all as one batch."""
    norm = run.options.training.max_grad_norm
    if not run.options.training.gradient_cache:
        return train_step(run.accelerator, run.model, run.loss, micro_batches, run.optimizer, max_grad_norm=norm)
    cache = GradientCache(run.accelerator, run.outputs, run.objective.loss, models=[run.model])
    return cache.step(micro_batches, run.optimizer, max_grad_norm=norm)
