"""Tensors of FSDP2's communication, told from others."""

import pytest
import torch

from hf_memopt.planning.accounting.categories import COMMUNICATION, GATHERED, exchanged
from hf_memopt.planning.accounting.operation import Operation


@pytest.mark.parametrize(("operation", "position"), [("_allgather_base_", 0), ("_reduce_scatter_base_", 1)])
def test_the_buffer_of_a_collective(operation: str, position: int) -> None:
    output, read = torch.zeros(4), torch.zeros(2)
    function = getattr(torch.ops.c10d, operation).default
    assert list(exchanged(Operation.of(function, (output, read), {}, None))) == [
        (COMMUNICATION, [(output, read)[position]])
    ]


def test_weights_copied_from_it() -> None:
    import torch.distributed.fsdp  # registers the operation

    weights = [torch.zeros(2), torch.zeros(2)]
    function = torch.ops.fsdp.split_with_sizes_copy.default
    operation = Operation.of(function, (torch.zeros(4), [2, 2]), {"out": weights}, None)
    assert list(exchanged(operation)) == [(GATHERED, weights)]


def test_other_operations_have_none() -> None:
    operation = Operation.of(torch.ops.aten.add.Tensor, (torch.zeros(1), torch.zeros(1)), {}, None)
    assert list(exchanged(operation)) == []
