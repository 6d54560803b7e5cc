"""The class of a denoiser, told by its inputs, its layers for adapters, and its loss, as diffusers' scripts have it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
# A prediction, from noisy latents and time; and a loss, from that and latents.
Predict = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Predict, Tensor], Tensor]

TIMES = 1000


class Sizes(NamedTuple):
    """The sizes of a batch."""

    num_samples: int
    num_text: int  # text tokens of a sample, all encoders together
    frames: int  # of the latents, as `height` and `width` are; 1, they are of images
    height: int
    width: int


Conditions = Callable[[Any, Sizes], Inputs]


def text_alone(name: str) -> Conditions:
    """Return conditions that are text embeddings alone, as wide as the configuration's `name`."""
    return lambda config, sizes: {
        "encoder_hidden_states": torch.zeros(sizes.num_samples, sizes.num_text, getattr(config, name))
    }


def masked_text(name: str) -> Conditions:
    """Return the same with a mask that hides none."""
    text = text_alone(name)
    return lambda config, sizes: (
        text(config, sizes) | {"encoder_attention_mask": torch.tensor([[1] * sizes.num_text] * sizes.num_samples)}
    )


def plain_prediction(model: nn.Module, noisy: Tensor, time: Tensor, conditions: Inputs) -> Tensor:
    prediction: Tensor = model(hidden_states=noisy, timestep=time, **conditions, return_dict=False)[0]
    return prediction


def check_channels(config: Any) -> None:
    """Refuse a model that takes more channels than it makes: an image to change beside the noisy latents."""
    if config.out_channels not in (None, config.in_channels):
        raise ValueError(
            f"task='denoising': this {config.class_name} takes {config.in_channels} channels and makes "
            f"{config.out_channels}: models of images beside text are not simulated; name one of text alone"
        )


def check_nothing(config: Any) -> None:
    """Take every configuration: the class's outputs have other channels than its inputs, or no name for them."""


def attention_layers(config: Any) -> str:
    return "to_q,to_k,to_v,to_out.0"


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


@dataclass(frozen=True, kw_only=True)
class DenoiserFamily:
    conditions: Conditions  # from configuration and sizes: inputs beside latents and time
    # From model, noisy latents, time and conditions: a prediction of the latents' size.
    predict: Callable[[nn.Module, Tensor, Tensor, Inputs], Tensor] = plain_prediction
    loss: Loss = flow_loss
    lora_targets: Callable[[Any], str] = attention_layers  # that its script adapts; without a script, of attention
    clip_tokens: int = 0  # text tokens whose number is fixed
    text_tokens: int = 0  # other text tokens, unless a run says how many; 0, there are none
    check: Callable[[Any], None] = check_channels  # refuses configurations of other inputs
    channels: Callable[[Any], int] = lambda config: int(config.in_channels)
    pixels: Callable[[Any], int] = lambda config: 8  # on a side of the square that a latent stands for
    patch: int = 2  # latents on a side of the square that the model takes as one
    frames: int = 0  # of a video that a latent stands for, but for the first, which has its own; 0, it learns images
    is_square: bool = False  # it takes square images alone
    vae_in_float32: Callable[[Any], bool] = lambda config: False  # as its script keeps it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the class, which its script changes
    flags: frozenset[str] = frozenset()  # of its script, which others lack
