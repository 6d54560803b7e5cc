import torch
from torch import Tensor, nn

from hf_memopt.weights.packed_weights import PackedWeights
from hf_memopt.weights.streaming.access_trace import Read, Tracer


class Reader(nn.Module):
    """A module that reads its own weight after calling another module, and that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.first(self.rows(tokens)) @ self.second.weight


def test_reads_are_attributed_and_gathered_rows_are_none() -> None:
    module = Reader()
    weights = PackedWeights(module)
    (rows,), (first,), (second,) = (weights.slices_of[id(parameter)] for parameter in module.parameters())
    seen: list[tuple[int, ...]] = []
    tracer = Tracer(module, weights.slices_of, seen.append)
    with tracer.running(), torch.no_grad():
        module(torch.tensor([1, 2]))
        module.rows.weight.sum()
    assert tracer.reads[0] == Read((first,), "first")
    assert Read((second,), "", late=True) in tracer.reads
    assert tracer.reads[-1] == Read((rows,), None)
    assert tracer.called == {"", "rows", "first"}
    assert len(seen) == len(tracer.reads)
    assert not module.first._forward_pre_hooks
