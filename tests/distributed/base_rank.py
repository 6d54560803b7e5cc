"""One rank of a data-parallel training with a frozen base that streams."""

import torch
from frozen_bases import adapted, ids, same, trainable
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt import StreamedWeights


def train(model: nn.Module, rank: int, base: StreamedWeights | None) -> list[Tensor]:
    ddp = DistributedDataParallel(model)
    found = []
    for step in range(3):
        tokens = ids(seed=2 * step + rank)
        if base is None:
            loss = ddp(tokens).square().mean()
        else:
            with base.stream():
                loss = ddp(tokens).square().mean()
        loss.backward()
        for parameter in trainable(model):
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return found


def outcomes() -> dict[str, object]:
    """Return whether gradients are those of the resident run, and the errors for ranks with different bases."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    want = train(adapted(), rank, None)
    equal = {}
    for home in ("host", "file"):
        model = adapted()
        base = StreamedWeights(model, home=home, device="cpu")
        equal[home] = same(train(model, rank, base), want)
    different = adapted()
    with torch.no_grad():
        different.head.weight[0, 0] += rank
    refusals = []
    for home in ("host", "file"):
        try:
            StreamedWeights(different, home=home, device="cpu")
        except ValueError as error:
            refusals.append(str(error))
    return {"equal": equal, "refusals": refusals}
