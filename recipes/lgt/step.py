"""The loss of `train_lgt.py`, and one update, apart from its loop: model, optimizer, and the state of a run.

All losses compute in float32 at least, also under autocast. But for the clipping and the check of gradients, an update
neither waits for the device nor decides by tensors' values, so that it also runs on tensors without data.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from hf_memopt.recipes.common import loop
from hf_memopt.recipes.lgt.data import Batch
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.training import GradientCache, StepResult, train_step
from hf_memopt.training.loss_terms import wide


def sliced_wasserstein(
    output: Tensor, target: Tensor, *, patch_size: int = 3, num_projections: int = 64, max_samples: int = 8192
) -> Tensor:
    """Return the squared distance between the distributions of two sets of patches, along random directions, `()`.

    It is no mean over samples: the mean over the halves of a batch is larger, and has another gradient. Costs a sort of
    `max_samples` numbers for each direction.

    Args:
        output: latents, `(batch, channels, height, width)`.
        target: as many others, in no particular order.
        patch_size: side of a patch; there is one around each position, padded with zeros.
        num_projections: directions, drawn anew in each call.
        max_samples: patches drawn from each set, the same positions in both.

    Source: J. Rabin, G. Peyré, J. Delon, M. Bernot: Wasserstein Barycenter and Its Application to Texture Mixing, 2011.
    """
    with full_precision(output):
        ours, theirs = (_patches(latents, patch_size) for latents in (output, target))
        if len(ours) > max_samples:
            rows = torch.randperm(len(ours), device=ours.device)[:max_samples]
            ours, theirs = ours[rows], theirs[rows]
        drawn = torch.randn(ours.shape[1], num_projections, device=ours.device, dtype=ours.dtype)
        directions = F.normalize(drawn, dim=0)
        return F.mse_loss((ours @ directions).sort(dim=0).values, (theirs @ directions).sort(dim=0).values)


def self_similarity_difference(output: Tensor, content: Tensor, max_positions: int | None = None) -> Tensor:
    """Return the mean squared difference between the cosine similarities of all pairs of positions, `()`.

    A mean over samples `(batch, channels, height, width)`. Memory and time are quadratic in positions: at 32 x 32,
    4 MiB per sample and matrix. With `max_positions` only so many are compared, drawn anew in each call.
    """
    with full_precision(output):
        ours, theirs = (wide(latents).flatten(2) for latents in (output, content))
        num_positions = ours.shape[2]
        if max_positions is not None and max_positions < num_positions:
            chosen = torch.randperm(num_positions, device=ours.device)[:max_positions]
            ours, theirs = ours[..., chosen], theirs[..., chosen]
        return F.mse_loss(_similarities(ours), _similarities(theirs))


def full_precision(tensor: Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


def _patches(latents: Tensor, size: int) -> Tensor:
    """Return one patch for each position of each sample: `(batch * height * width, channels * size * size)`."""
    unfolded = F.unfold(wide(latents), size, padding=size // 2)
    return unfolded.transpose(1, 2).flatten(0, 1)


def _similarities(latents: Tensor) -> Tensor:
    directions = F.normalize(latents, dim=1)
    return directions.transpose(1, 2) @ directions


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
