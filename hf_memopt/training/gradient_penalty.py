"""Penalties on the gradient of a discriminator by its input."""

import torch
from torch import Tensor


def r1_penalty(scores: Tensor, images: Tensor) -> Tensor:
    """Mean over the batch of the squared L2 norm of d(score) / d(image): R1, without its factor gamma / 2.

    An image's score is the mean of its logits, so that the penalty does not depend on how many patches there are. Its
    backward differentiates a second time; it takes the graph of `scores` along, and one backward of the sum of both
    losses frees it:

        images.requires_grad_()
        scores = discriminator(images)
        loss = torch.relu(1 - scores).mean() + gamma / 2 * r1_penalty(scores, images)
        loss.backward(inputs=list(discriminator.parameters()))

    With `inputs`, no gradient of the images themselves is computed and left in `images.grad`.

    Args:
        scores: logits of the discriminator for `images`, `(batch, ...)`, computed with gradients enabled. In training
            mode BatchNorm mixes the images of a batch, and the penalty is then of the batch instead of each image.
        images: `(batch, ...)`, any number of dimensions after the first, requiring a gradient.

    Returns:
        float32 (float64 for float64), `()`: squares of half-precision gradients would overflow or vanish.

    Raises:
        ValueError: `images` requires no gradient, `scores` has no graph, or their batches differ.
        RuntimeError: `scores` does not depend on `images`.

    Cost: one backward now and a backward through that backward later; until then everything of both is alive. Passing
    `retain_graph=True` as well, as many implementations do, changes nothing: it defaults to `create_graph`. What leaks
    is `backward(create_graph=True)`, which ties parameters and gradients in a cycle.

    Source: Mescheder et al., Which Training Methods for GANs do actually Converge?, 2018, arXiv:1801.04406.
    """
    _check(scores, images)
    (gradient,) = torch.autograd.grad(scores.reshape(len(scores), -1).mean(1).sum(), images, create_graph=True)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide.reshape(len(wide), -1).square().sum(1).mean()


def _check(scores: Tensor, images: Tensor) -> None:
    if not images.requires_grad:
        raise ValueError("images requires no gradient; call images.requires_grad_() before the discriminator sees them")
    if not scores.requires_grad:
        raise ValueError("scores has no graph; call the discriminator with gradients enabled")
    if scores.dim() < 1 or scores.shape[:1] != images.shape[:1]:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} are not those of images of shape {tuple(images.shape)}; pass one "
            "logit per image or more, the batch first"
        )
