"""A watch over copiers: weights in any form must not be sent to the host."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hf_memopt.transfer import Copier, Transfer


def forbid_weights(copier: Copier, module: nn.Module, others: Iterable[Tensor] = ()) -> Copier:
    """Let `copier` fail at `module`'s weights, also autocast ones, and at `others`, such as dequantised weights."""
    forbidden = {
        content(form) for tensor in (*module.parameters(), *module.buffers(), *others) for form in forms(tensor)
    }
    sizes = set(map(len, forbidden))
    send = copier.to_host

    def to_host(source: Tensor, destination: Tensor) -> Transfer:
        is_weight = source.nbytes in sizes and content(source) in forbidden
        assert not is_weight, "a weight was sent to the host"
        return send(source, destination)

    copier.to_host = to_host
    return copier


def forms(tensor: Tensor) -> Iterator[Tensor]:
    """Return a weight's memory in all forms, except for scalars, which other tensors may equal by chance."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel() < 2:
        return
    for each in (tensor, tensor.mT) if tensor.ndim > 1 else (tensor,):
        yield each
        if tensor.is_floating_point():
            yield each.to(torch.bfloat16)


def content(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
