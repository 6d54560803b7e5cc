"""Losses taken in less memory: networks as losses, chunk by chunk, and penalties on gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt.ranges import COUNT


def chunked_loss(loss_fn: Callable[..., Tensor], output: Tensor, *targets: Tensor, chunk_size: int = 1) -> Tensor:
    """Mean over samples of `loss_fn(output, *targets)`, whose gradient by `output` is taken at once, chunk by chunk.

    For losses that are networks themselves, such as LPIPS: autograd would keep their saved tensors for all samples
    until backward. Here one chunk's is alive at a time, and none of it outlives the call; the graph keeps the gradient
    by `output`, which is as large as `output`. Value and gradient are those of `loss_fn(output, *targets).mean()`, up
    to rounding: kernels may sum in another order for another batch size.

    Args:
        loss_fn: maps n samples and their targets to n losses, of any shape, or to their mean. A frozen function or
            module: nothing but `output` gets a gradient.
        output: `(batch, ...)`.
        targets: `(batch, ...)`, without gradients.
        chunk_size: samples per call of `loss_fn`; the last chunk may be smaller.

    Returns:
        Scalar. It can be differentiated once.

    Raises:
        ValueError: `chunk_size` is below 1, a target requires a gradient or has another batch size, or `loss_fn` is a
            module with trainable parameters.

    Cost: the backward of `loss_fn`, now instead of later. Saved-tensor hooks that are active outside do not see tensors
    saved inside: none is offloaded, since they are used at once.
    """
    COUNT.check("chunk_size", chunk_size)
    if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise ValueError("loss_fn has trainable parameters, which would get no gradient; call requires_grad_(False)")
    for number, target in enumerate(targets):
        if target.requires_grad:
            raise ValueError(f"targets[{number}] requires a gradient and would get none; detach it")
        if len(target) != len(output):
            raise ValueError(f"targets[{number}] has {len(target)} samples, and output has {len(output)}")
    differentiated = torch.is_grad_enabled() and output.requires_grad
    values: list[Tensor] = []
    gradients: list[Tensor] = []
    for part, *part_targets in zip(*(torch.split(each, chunk_size) for each in (output, *targets)), strict=True):
        chunk = part.detach().requires_grad_(differentiated)
        # These hooks hide the chunk from outer ones: offloading tensors that are used at once would only cost time.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            value = loss_fn(chunk, *part_targets).mean() * (len(part) / len(output))
        if differentiated:
            gradients += torch.autograd.grad(value, chunk)
        values.append(value.detach())
    total = torch.stack(values).sum()
    if not differentiated:
        return total
    injected: Tensor = _InjectedGradient.apply(output, total, torch.cat(gradients))  # type: ignore[no-untyped-call]
    return injected


class _InjectedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None, None


def r1_penalty(scores: Tensor, images: Tensor) -> Tensor:
    """Mean over the batch of the squared L2 norm of d(score) / d(image): R1, without its factor gamma / 2.

    An image's score is the mean of its logits, so that the penalty does not depend on the number of patches. Its
    backward differentiates a second time and takes the graph of `scores` along; one backward of the sum of both losses
    frees it:

        images.requires_grad_()
        scores = discriminator(images)
        loss = torch.relu(1 - scores).mean() + gamma / 2 * r1_penalty(scores, images)
        loss.backward(inputs=list(discriminator.parameters()))

    With `inputs`, no gradient of the images themselves is left in `images.grad`.

    Args:
        scores: logits of the discriminator for `images`, `(batch, ...)`, computed with gradients enabled. In training
            mode BatchNorm mixes the images of a batch, and the penalty is then of the batch instead of each image.
        images: `(batch, ...)`, any number of dimensions after the first, requiring a gradient.

    Returns:
        float32 (float64 for float64), `()`: squares of half-precision gradients would overflow or vanish.

    Raises:
        ValueError: `images` requires no gradient, `scores` has no graph, or their batches differ.
        RuntimeError: `scores` does not depend on `images`.

    Cost: one backward now and one through it later; until then everything of both is alive. `retain_graph=True`, as
    many implementations pass, changes nothing: it defaults to `create_graph`. The leak is
    `backward(create_graph=True)`, which ties parameters and gradients in a cycle.

    Source: Mescheder et al., Which Training Methods for GANs do actually Converge?, 2018, arXiv:1801.04406.
    """
    if not images.requires_grad:
        raise ValueError("images requires no gradient; call images.requires_grad_() before the discriminator sees them")
    if not scores.requires_grad:
        raise ValueError("scores has no graph; call the discriminator with gradients enabled")
    if scores.dim() < 1 or scores.shape[:1] != images.shape[:1]:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} are not those of images of shape {tuple(images.shape)}; pass one "
            "logit per image or more, the batch first"
        )
    (gradient,) = torch.autograd.grad(scores.reshape(len(scores), -1).mean(1).sum(), images, create_graph=True)
    return wide(gradient).reshape(len(gradient), -1).square().sum(1).mean()


def wide(values: Tensor) -> Tensor:
    """Cast a tensor in half precision, as autocast returns it, to float32; return others unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
