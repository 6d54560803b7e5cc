import pytest
import torch
from torch import nn

from hf_memopt.memory import SavedBytes


def test_each_storage_counts_once_and_excluded_ones_do_not() -> None:
    layer, x = nn.Linear(8, 4), torch.ones(2, 8, requires_grad=True)
    with SavedBytes(layer.parameters()) as saved:
        (layer(x) * x[:, :4]).sum()
    assert saved.total_bytes == 4 * (2 * 8 + 2 * 4)  # x, which two operations save, and the layer's output


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("layout", "num_indices"), [("coo", 6 + 6), ("csr", 7 + 6), ("csc", 7 + 6)])
def test_sparse_tensors_count_with_their_indices_and_values(layout: str, num_indices: int) -> None:
    diagonal, values, x = torch.arange(6), torch.ones(6), torch.ones(6, 3, requires_grad=True)
    if layout == "coo":
        matrix = torch.sparse_coo_tensor(torch.stack([diagonal, diagonal]), values, (6, 6), is_coalesced=True)
    else:
        kind = getattr(torch, f"sparse_{layout}")
        matrix = torch.sparse_compressed_tensor(torch.arange(7), diagonal, values, layout=kind)
    with SavedBytes() as saved:
        torch.sparse.mm(matrix, x)
    assert saved.total_bytes == 8 * num_indices + 4 * 6
    with SavedBytes(exclude=[matrix]) as saved:
        torch.sparse.mm(matrix, x)
    assert saved.total_bytes == 0


def test_nested_tensors_count_with_what_they_wrap() -> None:
    values = torch.ones(5, 3, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    with SavedBytes() as saved:
        x.sin()
    assert saved.total_bytes == 4 * 5 * 3 + 8 * 3  # values and offsets


def test_storages_without_memory_count_once_each() -> None:
    x = torch.ones(4, device="meta", requires_grad=True)
    with SavedBytes() as saved:
        x.sin().cos()
    assert saved.total_bytes == 2 * 4 * 4
