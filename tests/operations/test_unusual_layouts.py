"""Tests that sparse, nested and oneDNN's tensors stay on the device, while all others move."""

from collections.abc import Callable

import pytest
import torch
from known_obstacles import LAYOUT_OBSTACLES, faults_of
from offload_variants import try_everything
from operation_cases import Case
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's warnings about its layouts

NUM_NODES, WIDTH = 5, 4


def adjacency() -> Tensor:
    ring = torch.eye(NUM_NODES) + torch.eye(NUM_NODES).roll(1, 0)
    return ring / ring.sum(1)


class GraphLayer(nn.Module):
    """A graph convolution: a dense layer, then a weighted sum over neighbours."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("adjacency", adjacency().to_sparse(layout=layout))

    def forward(self, nodes: Tensor) -> Tensor:
        messages = self.linear(nodes)
        with torch.autocast("cpu", enabled=False):  # sparse products do not support autocast
            return torch.relu(torch.sparse.mm(self.adjacency, messages.float()))


class GraphNetwork(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(layout) for _ in range(2))

    def forward(self, nodes: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = nodes + layer(nodes)
        return nodes


def nested_product(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2] * 1, x[2:] * 2], layout=layout)
        return (nested.sin() * nested).to_padded_tensor(0.0)

    return function


def csr_values(x: Tensor) -> Tensor:
    """Return the product of a CSR matrix whose values have gradients."""
    rows, columns = torch.arange(0, NUM_NODES + 1) * WIDTH, torch.arange(WIDTH).repeat(NUM_NODES)
    matrix = torch.sparse_csr_tensor(rows, columns, x.flatten(), (NUM_NODES, WIDTH))
    return matrix @ torch.sin(x).t()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO operand": lambda x: torch.sparse.mm(adjacency().to_sparse(), torch.sin(x)),
    "COO operand with gradient": lambda x: torch.sparse.mm((adjacency()[:, :WIDTH] * x).to_sparse(), x.t().exp()),
    "COO saved": lambda x: (x.to_sparse() * x.exp().to_sparse()).to_dense(),
    "COO result saved": lambda x: torch.relu(x.to_sparse()).to_dense(),
    "COO sum": lambda x: torch.sparse.sum(x.exp().to_sparse(), 0).to_dense(),
    "COO softmax": lambda x: torch.sparse.softmax(x.exp().to_sparse(), 1).to_dense(),
    "CSR operand": lambda x: adjacency().to_sparse_csr() @ torch.sin(x),
    "CSR with gradient": csr_values,
    "CSC operand": lambda x: adjacency().to_sparse_csc() @ torch.sin(x),
    "BSR saved": lambda x: torch.sin(x)[:4].to_sparse_bsr((2, 2)).to_dense(),
    "sparse gradient": lambda x: nn.functional.embedding(torch.tensor([1, 2, 1]), x, sparse=True).exp(),
    "nested strided": nested_product(torch.strided),
    "nested jagged": nested_product(torch.jagged),
    "oneDNN": lambda x: torch.relu(torch.sin(x).to_mkldnn()).to_dense(),
    "oneDNN linear": lambda x: nn.functional.linear(torch.sin(x).to_mkldnn(), x.exp()).to_dense(),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "graph network, COO": lambda: GraphNetwork(torch.sparse_coo),
    "graph network, CSR": lambda: GraphNetwork(torch.sparse_csr),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    leaf = torch.randn(NUM_NODES, WIDTH, requires_grad=True)
    if name in MODELS:
        model = MODELS[name]()
        return Case(name, model, [leaf], model)
    return Case(name, FUNCTIONS[name], [leaf])


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("threshold_mb", [0, 10])
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODELS])
def test_a_layout(name: str, threshold_mb: float) -> None:
    outcome = try_everything(case_of(name), threshold_mb=threshold_mb)
    assert not faults_of([outcome], LAYOUT_OBSTACLES.get(name, ()), is_whole=True)
