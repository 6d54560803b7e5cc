"""A watch over copiers: weights, whatever form they have been given, must not be sent to the host."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hf_memopt.transfer import Copier, Transfer


def forbid_weights(copier: Copier, module: nn.Module, others: Iterable[Tensor] = ()) -> Copier:
    """Let `copier` fail when it is to send a parameter or buffer, as it is or as autocast rounds it.

    Args:
        copier: changed in place.
        module: whose weights are watched.
        others: more tensors that must stay, such as dequantised weights.
    """
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
    """A weight's memory as it may be met, except for scalars, which other tensors may equal by chance."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel() < 2:
        return
    for each in (tensor, tensor.mT) if tensor.ndim > 1 else (tensor,):
        yield each
        if tensor.is_floating_point():
            yield each.to(torch.bfloat16)


def content(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
