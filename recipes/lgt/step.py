"""One training step of `train_lgt.py`, apart from its loop: model, optimizer, batches and loss.

Nothing here waits for the device or decides by what tensors hold, so that it also runs on tensors without data.
"""

import torch
from torch import Tensor, nn

from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.losses import full_precision, self_similarity_difference, sliced_wasserstein
from hf_memopt.recipes.lgt.model import LatentTransfer

# start, time: where integration starts, and when; latents: the content; targets: style ids; target_latents: samples of
# those styles; style_weights: of each sample's style loss; dropped: samples without a style. Samples first.
Batch = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def build_model(config: Config) -> LatentTransfer:
    """The model with random weights, on torch's default device."""
    training = config.training
    model = LatentTransfer(config.model, legacy_dt=training.legacy_dt, average_style=training.use_avg_style_for_uncond)
    model.checkpointing = training.use_gradient_checkpointing
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on all weights."""
    training = config.training
    return torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)


def make_batch(config: Config, device: torch.device | str) -> Batch:
    """A batch of random latents, of the size that the configuration names."""
    size, num = config.data.latent_size, config.training.batch_size
    latents, target_latents = (
        torch.randn(num, config.model.latent_channels, size, size, device=device) for _ in range(2)
    )
    targets = torch.arange(num, device=device) % config.model.num_styles
    dropped = torch.zeros(num, dtype=torch.bool, device=device)
    weights = torch.ones(num, device=device)
    return assemble(latents, target_latents, targets, weights, dropped, config.training.epsilon)


def assemble(
    latents: Tensor, target_latents: Tensor, targets: Tensor, style_weights: Tensor, dropped: Tensor, epsilon: float
) -> Batch:
    """A batch whose samples start at times of their own, from `epsilon` on, between noise and content."""
    time = epsilon + (1 - epsilon) * torch.rand(len(latents), device=latents.device, dtype=latents.dtype)
    start = between(torch.randn_like(latents), latents, time)
    return {
        "start": start,
        "time": time,
        "latents": latents,
        "targets": targets,
        "target_latents": target_latents,
        "style_weights": style_weights,
        "dropped": dropped,
    }


def between(noise: Tensor, latents: Tensor, time: Tensor) -> Tensor:
    """Noise at time 0, latents at time 1, `(batch, channels, height, width)`; `time` is `(batch,)`."""
    share = time.view(-1, 1, 1, 1)
    return (1 - share) * noise + share * latents


class Objective:
    """The loss, and its components in the batches so far.

    `w_style * mean(style_weights) * SWD(output, target_latents) + w_content * SSM(output, latents)`, and with
    `use_velocity_reg` `vel_reg_weight` times the mean square of the velocity that integration starts with. The original
    computes that velocity in a forward pass of its own.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._num_steps = config.loss, config.training.ode_integration_steps
        self._seen: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, `()`."""
        return self.loss(*self.outputs(model, batch))

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the loss is made of, samples first: it may be concatenated over batches."""
        moved, energy = model(batch["start"], batch["time"], batch["targets"], batch["dropped"], self._num_steps)
        return moved, energy, batch["latents"], batch["target_latents"], batch["style_weights"]

    def loss(self, moved: Tensor, energy: Tensor, latents: Tensor, target_latents: Tensor, weights: Tensor) -> Tensor:
        """The loss of all samples of `outputs` together, `()`."""
        config = self._config
        swd = sliced_wasserstein(
            moved,
            target_latents,
            patch_size=config.patch_size,
            num_projections=config.num_projections,
            max_samples=config.max_samples,
        )
        ssm = self_similarity_difference(moved, latents, config.max_spatial_samples)
        with full_precision(moved):
            total = config.w_style * weights.mean() * swd + config.w_content * ssm
            terms = {"style_swd": swd, "content_ssm": ssm}
            if config.use_velocity_reg:
                terms["velocity"] = energy.mean()
                total = total + config.vel_reg_weight * terms["velocity"]
        # Copies: torch's mse_loss leaves the memory of all squares behind its mean, which a view would keep.
        self._seen.append({name: term.detach().clone() for name, term in {"loss": total, **terms}.items()})
        return total

    def take_means(self) -> dict[str, Tensor]:
        """The mean of the loss and of each component over the batches since the last call, `()` each, on the device."""
        seen, self._seen = self._seen, []
        return {name: torch.stack([terms[name] for terms in seen]).mean() for name in seen[0]} if seen else {}


def training_step(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Forward, backward, clip, update, without accelerate; `functools.partial(training_step, config)` takes the rest.

    Returns:
        The loss, `()`, on the device.

    Raises:
        ValueError: float16, which needs the loss scaler of the recipe's own loop.
    """
    training = config.training
    if training.use_amp and training.amp_dtype == "float16":
        raise ValueError("training.amp_dtype='float16' needs a loss scaler; use bfloat16, which takes as much memory")
    with torch.autocast(batch["start"].device.type, torch.bfloat16, enabled=training.use_amp):
        loss = Objective(config)(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
