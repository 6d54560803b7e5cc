from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_memopt.recipes.lgt.model import compile_module, compile_seconds


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.fixture(autouse=True)
def restored_limit() -> Iterator[None]:
    """Restore the recompile limit, a setting of the whole process."""
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


def test_a_compiled_module_is_the_same_module() -> None:
    """Compile with a backend that needs no compiler."""
    torch.manual_seed(0)
    module, batch = Network(), torch.randn(2, 3)
    names, want, before = list(module.state_dict()), module(batch), compile_seconds()
    compile_module(module, recompile_limit=16, backend="eager")
    assert torch._dynamo.config.recompile_limit == 16
    assert compile_seconds() == before  # until the first call
    assert torch.equal(module(batch), want)
    assert list(module.state_dict()) == names
    first = compile_seconds()
    assert first > before
    module(batch)
    assert compile_seconds() == first


def test_what_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='dufault' is unknown to torch.compile; choose from default, "):
        compile_module(nn.Linear(1, 1), mode="dufault")
    with pytest.raises(ValueError, match="recompile_limit=0 must be at least 1"):
        compile_module(nn.Linear(1, 1), recompile_limit=0)
