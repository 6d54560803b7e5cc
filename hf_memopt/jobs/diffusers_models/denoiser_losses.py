"""The losses of diffusers' training scripts: from a prediction, called with noisy latents and time, and latents."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

TIMES = 1000

Predict = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Predict, Tensor], Tensor]


def noise_loss(predict: Predict, latents: Tensor) -> Tensor:
    """Compare with the noise; times are whole numbers."""
    from diffusers import DDPMScheduler

    noise = torch.randn_like(latents)
    times = _times(latents)
    noisy = DDPMScheduler().add_noise(latents, noise, times)
    return nn.functional.mse_loss(predict(noisy, times).float(), noise.float())


def flow_loss(predict: Predict, latents: Tensor) -> Tensor:
    """Compare with the velocity from noise to data; times are float32."""
    noise = torch.randn_like(latents)
    times = torch.rand(latents.shape[0], device=latents.device) * TIMES
    sigmas = (times / TIMES).to(latents.dtype).view(-1, *[1] * (latents.ndim - 1))
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    prediction = predict(noisy, times)
    weights = torch.ones_like(sigmas)
    target = noise - latents
    errors = (weights.float() * (prediction.float() - target.float()) ** 2).reshape(target.shape[0], -1)
    return torch.mean(errors, 1).mean()


def data_loss(predict: Predict, latents: Tensor) -> Tensor:
    """Compare the data that a predicted velocity leads to, as CogVideoX's script does."""
    from diffusers import CogVideoXDPMScheduler

    scheduler = CogVideoXDPMScheduler()
    noise = torch.randn_like(latents)
    times = _times(latents)
    noisy = scheduler.add_noise(latents, noise, times)
    predicted = scheduler.get_velocity(predict(noisy, times), noisy, times)
    products = scheduler.alphas_cumprod[times]
    weights = (1 / (1 - products)).view(-1, *[1] * (latents.ndim - 1))
    return torch.mean((weights * (predicted - latents) ** 2).reshape(latents.shape[0], -1), dim=1).mean()


def _times(latents: Tensor) -> Tensor:
    return torch.randint(0, TIMES, (latents.shape[0],), device=latents.device)
