"""Tests of the innermost running module on the stack, and of possible casts of its frozen weights."""

import pytest
import torch
from torch import Tensor, nn

from hf_memopt.autograd_state import calling_module, may_be_cast_of_frozen_weight


class Asking(nn.Module):
    """A module whose weight records the answers while it is called."""

    def __init__(self, requires_grad: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=requires_grad)
        self.caller: nn.Module | None = None
        self.is_cast: bool | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        self.caller, self.is_cast = calling_module(), may_be_cast_of_frozen_weight(tensor)
        return tensor


def test_the_innermost_module_is_at_work() -> None:
    asking = Asking()
    nn.Sequential(nn.Identity(), nn.Sequential(asking))(torch.ones(1))
    assert asking.caller is asking
    assert calling_module() is None


@pytest.mark.parametrize(
    ("tensor", "trainable", "is_cast"),
    [
        (torch.ones(4, 4, dtype=torch.bfloat16), False, True),
        (torch.ones(16), False, True),
        (torch.ones(4, 4), True, False),
        (torch.ones(4, 5), False, False),
        (torch.ones(4, 4, dtype=torch.int32), False, False),
        (torch.ones(4, 4, requires_grad=True), False, False),
    ],
)
def test_copies_of_frozen_weights(tensor: Tensor, trainable: bool, is_cast: bool) -> None:
    asking = Asking(trainable)
    asking(tensor)
    assert asking.is_cast == is_cast
    assert not may_be_cast_of_frozen_weight(tensor)  # no module is running
