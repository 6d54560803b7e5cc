import torch
from torch import nn

from hf_memopt.memory import SavedBytes


def test_each_storage_counts_once_and_excluded_ones_do_not() -> None:
    layer, x = nn.Linear(8, 4), torch.ones(2, 8, requires_grad=True)
    with SavedBytes(layer.parameters()) as saved:
        (layer(x) * x[:, :4]).sum()
    assert saved.total_bytes == 4 * (2 * 8 + 2 * 4)  # x, which two operations save, and the layer's output
