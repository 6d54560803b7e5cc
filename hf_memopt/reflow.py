"""Rectified flow as pure tensor functions, in SmolVLA's convention: time 1 is noise, time 0 is data.

Liu et al., "Flow Straight and Fast" (arXiv 2209.03003) runs time the other way round; with tau = 1 - t its velocity is
the negative of the one here. A *coupling* is a pair (noise, actions) that one solution of the teacher's ODE connects;
training on couplings instead of independent pairs straightens the paths until one Euler step suffices.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["chunk_loss", "interpolate", "reflow_loss", "sample_time", "straightness", "velocity_target"]

TimeSampling = Literal["beta", "uniform", "ushaped", "one"]
TIME_SAMPLINGS: tuple[str, ...] = get_args(TimeSampling)

# lerobot's SmolVLA draws t from Beta(1.5, 1) * 0.999 + 0.001, so that t is never 0.
_BETA_CONCENTRATION = (1.5, 1.0)
_TIME_RANGE = 0.999
_TIME_MINIMUM = 0.001
# Sharpness of the U-shaped density in Lee et al., "Improving the Training of Rectified Flows" (arXiv 2405.20320).
_USHAPE_SHARPNESS = 4.0

LossKind = Literal["mse", "huber"]
LOSS_KINDS: tuple[str, ...] = get_args(LossKind)
# Threshold of the pseudo-Huber loss per element, from the published code of the same paper.
_HUBER_THRESHOLD = 0.00054


def interpolate(noise: Tensor, actions: Tensor, time: Tensor) -> Tensor:
    """Return the point on the straight line between noise and actions: `time * noise + (1 - time) * actions`.

    Args:
        noise: `(batch, ...)`, reached at time 1.
        actions: `(batch, ...)`, reached at time 0.
        time: `(batch,)` in [0, 1].
    """
    time = time.reshape(-1, *(1,) * (noise.ndim - 1))
    return time * noise + (1 - time) * actions


def velocity_target(noise: Tensor, actions: Tensor) -> Tensor:
    """Return the velocity of the straight line, d x_t / d t = noise - actions, `(batch, ...)`."""
    return noise - actions


def sample_time(batch_size: int, sampling: TimeSampling, device: torch.device | str = "cpu") -> Tensor:
    """Draw training times from torch's global random generator: `(batch_size,)` float32 in (0, 1].

    Args:
        batch_size: number of times to draw.
        sampling: `"beta"`, SmolVLA's own training density, which favours noise; `"uniform"`; `"ushaped"`, density
            proportional to cosh(4 (t - 1/2)), which RF++ (arXiv 2405.20320) recommends for reflow and which is drawn
            here by its closed-form quantile function; `"one"`, always t = 1, which distils the first step only.
        device: where the result lives.

    Raises:
        ValueError: `sampling` is unknown.
    """
    if sampling == "one":
        return torch.ones(batch_size, device=device)
    if sampling == "beta":
        # Drawn on the CPU as lerobot does: not every accelerator implements the Dirichlet kernel behind it.
        first, second = (torch.tensor(c) for c in _BETA_CONCENTRATION)
        time = torch.distributions.Beta(first, second).sample((batch_size,)).to(device)
    elif sampling == "uniform":
        time = torch.rand(batch_size, device=device)
    elif sampling == "ushaped":
        scale = math.sinh(_USHAPE_SHARPNESS / 2)
        time = 0.5 + torch.asinh((2 * torch.rand(batch_size, device=device) - 1) * scale) / _USHAPE_SHARPNESS
    else:
        raise ValueError(f"reflow_time_sampling={sampling!r} is unknown; use one of {', '.join(TIME_SAMPLINGS)}")
    return time * _TIME_RANGE + _TIME_MINIMUM


def reflow_loss(
    velocity: Tensor,
    noise: Tensor,
    actions: Tensor,
    num_action_dims: int,
    kind: LossKind = "mse",
    valid: Tensor | None = None,
) -> Tensor:
    """Return the error against the coupling's velocity, per sample, `(batch,)`.

    Args:
        velocity: the student's velocity at `interpolate(noise, actions, time)`, `(batch, chunk, padded_dim)`.
        noise: `(batch, chunk, padded_dim)`.
        actions: where the teacher's ODE took that noise, `(batch, chunk, padded_dim)`.
        num_action_dims: dimensions that the robot has; lerobot trains no others.
        kind: see `chunk_loss`.
        valid: see `chunk_loss`.
    """
    squared = (velocity_target(noise, actions) - velocity)[..., :num_action_dims].square()
    return chunk_loss(squared, kind, valid)


def chunk_loss(squared: Tensor, kind: LossKind = "mse", valid: Tensor | None = None) -> Tensor:
    """Reduce the squared errors of action chunks to one loss per sample, `(batch,)`.

    Args:
        squared: `(batch, chunk, action_dim)`.
        kind: `"mse"`, their mean. `"huber"`, the pseudo-Huber loss of RF++ (arXiv 2405.20320): the norm of a chunk's
            error, `(sqrt(sum + c**2) - c) / d` with `d` elements and `c = 0.00054 d`. It is less ruled by the samples
            with the largest errors; its gradients are of another size, so the learning rate may need another value.
        valid: `(batch, chunk)` bool, which steps of a chunk count. None, all: the teacher's chunk has no padding,
            unlike a demonstration that runs into the end of its episode.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in LOSS_KINDS:
        raise ValueError(f"reflow_loss={kind!r} is unknown; use one of {', '.join(LOSS_KINDS)}")
    if kind == "mse" and valid is None:
        return squared.mean(dim=(1, 2))
    counts = torch.ones_like(squared) if valid is None else valid[..., None].to(squared.dtype).expand_as(squared)
    num_elements = counts.sum(dim=(1, 2)).clamp_min(1)
    total = (squared * counts).sum(dim=(1, 2))
    if kind == "mse":
        return total / num_elements
    threshold = _HUBER_THRESHOLD * num_elements
    return ((total + threshold.square()).sqrt() - threshold) / num_elements


def straightness(trajectory: Tensor, normalize: bool = False) -> Tensor:
    """Measure how far an Euler trajectory is from a straight line; 0: one step suffices (arXiv 2209.03003, section 2).

    Returns a scalar: the mean over steps, batch and elements of the squared difference of local and overall velocity.

    Args:
        trajectory: the states on the Euler grid from noise to actions, `(num_steps + 1, batch, ...)`.
        normalize: divide by the mean squared length of the line, which makes values of different tasks comparable.
    """
    num_steps = trajectory.shape[0] - 1
    overall = trajectory[0] - trajectory[-1]
    local = num_steps * (trajectory[:-1] - trajectory[1:])
    value = (local - overall).square().mean()
    return value / overall.square().mean() if normalize else value
