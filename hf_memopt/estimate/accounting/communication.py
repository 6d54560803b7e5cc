"""Memory that a rank holds for the sake of the others: buffers of collectives, and gathered weights."""

from collections.abc import Iterator

from torch import Tensor

from hf_memopt.estimate.accounting.categories import COMMUNICATION, GATHERED
from hf_memopt.estimate.accounting.operation import Operation, name_of


def exchanged(operation: Operation) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the tensors of an operation of FSDP2 with their use; nothing for other operations.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py of torch 2.11. Shards are gathered into one buffer,
    from which the weights are copied; gradients are copied into another one, which is reduced to the shards' gradients.
    """
    match name_of(operation.function):
        case "c10d._allgather_base_.default":
            yield COMMUNICATION, [operation.args[0]]
        case "c10d._reduce_scatter_base_.default":
            yield COMMUNICATION, [operation.args[1]]
        case "fsdp.split_with_sizes_copy.default":
            yield GATHERED, operation.kwargs["out"]
