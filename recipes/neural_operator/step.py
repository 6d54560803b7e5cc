"""neuralop's models by the flags of `train_neural_operator.py`, one update, and errors as neuralop measures them."""

import contextlib
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from neuralop import H1Loss, LpLoss
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO, TFNO, UNO
from neuralop.models.base_model import BaseModel
from neuralop.training import AdamW
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from hf_memopt.activations import apply_selective_checkpointing
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.neural_operator.options import ModelOptions, TrainingOptions
from hf_memopt.training import split_batch


def make_model(options: ModelOptions, in_channels: int = 1, out_channels: int = 1, num_dims: int = 2) -> nn.Module:
    """Return a model of fields on a grid of `num_dims` dimensions. Torch's seed decides the weights."""
    channels = {"in_channels": in_channels, "out_channels": out_channels, "hidden_channels": options.hidden_channels}
    shape = {"n_modes": (options.modes,) * num_dims, "n_layers": options.num_layers}
    if options.model == "fno":
        model: nn.Module = FNO(**channels, **shape)
    elif options.model == "tfno":
        model = TFNO(**channels, **shape, factorization="tucker", rank=options.rank)
    else:
        model = _make_uno(options, channels, num_dims)
    keep_spectral_float32(model)
    if options.checkpointed_modules:
        apply_selective_checkpointing(model, "all", modules=options.checkpointed_modules)
    return model


def _make_uno(options: ModelOptions, channels: dict[str, int], num_dims: int) -> nn.Module:
    """Return one with half the resolution and twice the width between the second layer and the last but one."""
    width, modes, num_inner = options.hidden_channels, options.modes, options.num_layers - 2
    outer, inner = [modes] * num_dims, [modes // 2] * num_dims
    same, halved, doubled = [1] * num_dims, [0.5] * num_dims, [2] * num_dims
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its arguments
        return UNO(
            **channels,
            n_layers=options.num_layers,
            lifting_channels=2 * width,
            projection_channels=2 * width,
            uno_out_channels=[width, *[2 * width] * num_inner, width],
            uno_n_modes=[outer, *[inner] * num_inner, outer],
            uno_scalings=[same, halved, *[same] * (num_inner - 2), doubled, same],
            channel_mlp_skip="linear",  # the default, a gate per channel, cannot change the width
        )


def save_model(model: nn.Module, folder: Path) -> None:
    """Write `model_state_dict.pt`, and beside it the arguments for neuralop's `from_checkpoint`.

    A UNO has no such method: make it by `make_model` and let it load the state dict.
    """
    if isinstance(model, BaseModel):
        model.save_checkpoint(folder, "model")
    else:
        torch.save(model.state_dict(), folder / "model_state_dict.pt")


def keep_spectral_float32(model: nn.Module) -> None:
    """Let spectral convolutions compute in float32 also under autocast: CUDA has no bfloat16 Fourier transform."""
    for module in model.modules():
        if isinstance(module, SpectralConv):
            module.register_forward_pre_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.float() if isinstance(value, Tensor) else value for value in inputs)


Batch = dict[str, Tensor]


@cache
def relative_errors(num_dims: int) -> dict[str, Callable[..., Tensor]]:
    """Return neuralop's losses for fields on a grid of `num_dims` dimensions, `(samples, channels, *sides)`, by name.

    Each is a sum over samples and a mean over channels.
    """

    def by_channel(loss: Any) -> Callable[..., Tensor]:
        return lambda output, y, **others: loss(output, y, **others) / y.shape[1]

    # H1Loss takes fields for periodic by default, which these are not.
    edges = {f"periodic_in_{axis}": False for axis in "xyz"[:num_dims]}
    return {"l2": by_channel(LpLoss(d=num_dims, p=2)), "h1": by_channel(H1Loss(d=num_dims, **edges))}


@dataclass(kw_only=True)
class Run(loop.Run):
    processor: Any  # normalises samples, and solutions back
    tests: dict[int, DataLoader[Any]] = field(default_factory=dict)  # batches by resolution

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch_loss = torch.zeros((), device=self.accelerator.device)

    def position(self) -> dict[str, Any]:
        """Return it with the epoch's mean loss over processes, whose own sums are not kept."""
        return {**super().position(), "epoch_loss": self.accelerator.reduce(self.epoch_loss, "mean").item()}

    def restore(self, position: dict[str, Any]) -> None:
        self.epoch_loss.fill_(position.pop("epoch_loss"))
        super().restore(position)


def make_optimizer(model: nn.Module, training: TrainingOptions) -> Any:
    """Return neuralop's AdamW, which knows complex weights."""
    return AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)


class ComplexGradScaler(GradScaler):
    """Unscales complex gradients through real views, as torch has a kernel for those alone (pytorch/pytorch#58228)."""

    def _unscale_grads_(self, optimizer: Any, *settings: Any) -> dict[torch.device, Tensor]:
        parameters = [_as_real(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        in_real_numbers: Any = SimpleNamespace(param_groups=[{"params": parameters}])
        return super()._unscale_grads_(in_real_numbers, *settings)


def _as_real(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None or not parameter.is_complex():
        return parameter
    view = torch.view_as_real(parameter.detach())
    view.grad = torch.view_as_real(parameter.grad)
    return view


def update(run: Run, batch: Batch) -> Tensor:
    """Make one update of the weights; return the batch's mean loss, on the device.

    A sample's relative error is its own, so that micro-batches give the gradient of the whole batch up to rounding.
    """
    training = run.options.training
    batch = run.processor.preprocess(batch)
    loss_of = relative_errors(batch["y"].ndim - 2)[training.train_loss]
    parts = list(split_batch(batch, training.micro_batch_size or training.batch_size))
    losses = []
    for number, part in enumerate(parts, start=1):
        # Gradients are exchanged between processes once, in the last part's backward.
        with nullcontext() if number == len(parts) else run.accelerator.no_sync(run.model):
            # The offloader's context is around the forward pass; backward brings back the moved tensors.
            with run.memory.phase("forward"), run.saving():
                output, part = run.processor.postprocess(run.model(part["x"]), part)
                loss = loss_of(output, part["y"]) / len(batch["y"])
            with run.memory.phase("backward"):
                run.accelerator.backward(loss)
        run.end_micro_batch(loss)
        losses.append(loss.detach())
    with run.memory.phase("optimizer"):
        run.before_update()
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    run.progress.num_updates += 1
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return mean relative errors by test resolution and norm, as `l2_<resolution>` and `h1_<resolution>`."""
    run.model.eval()
    run.processor.eval()
    found: dict[str, float] = {}
    for resolution, batches in run.tests.items():
        errors = torch.cat([run.accelerator.gather_for_metrics(_errors(run, batch)) for batch in batches])
        means = errors.mean(dim=0).tolist()
        found |= {f"{name}_{resolution}": mean for name, mean in zip(relative_errors(2), means, strict=True)}
    run.model.train()
    run.processor.train()
    return found


def _errors(run: Run, batch: Batch) -> Tensor:
    batch = run.processor.preprocess(batch)
    output, batch = run.processor.postprocess(run.model(batch["x"]), batch)
    pairs, used = zip(output.split(1), batch["y"].split(1), strict=True), relative_errors(output.ndim - 2).values()
    return torch.stack([torch.stack([loss(ours, truth) for loss in used]) for ours, truth in pairs])
