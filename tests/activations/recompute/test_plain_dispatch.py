"""Tests that operations that call others give the same bits inside a dispatch mode as outside of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.activations.recompute.plain_dispatch import call_as_plain


class Plainly(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_as_plain(func, args, kwargs or {})


def complex_inverse() -> Tensor:
    return torch.linalg.pinv(torch.randn(4, 3, dtype=torch.complex64))


def bilinear() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.bilinear(torch.randn(2, 3), torch.randn(2, 4), torch.randn(5, 3, 4))


@torch.library.custom_op("plain_dispatch::product", mutates_args=())
def product(left: Tensor, right: Tensor) -> Tensor:
    """A product in the precision that autocast chooses."""
    return (left @ right).float()


@torch.library.custom_op("plain_dispatch::full_product", mutates_args=())
def full_product(left: Tensor, right: Tensor) -> Tensor:
    """A product whose operands autocast casts, without another cast of the operations inside."""
    return left @ right


full_product.register_autocast("cpu", torch.float32)


def custom_operation() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return product(torch.randn(4, 4), torch.randn(4, 4))


def custom_operation_that_autocast_knows() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return full_product(torch.randn(4, 4), torch.randn(4, 4))


def product_under_autocast() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.randn(4, 4) @ torch.randn(4, 4)


@pytest.mark.parametrize(
    "compute",
    [
        complex_inverse,
        bilinear,
        custom_operation,
        custom_operation_that_autocast_knows,
        product_under_autocast,
    ],
)
def test_as_outside_of_modes(compute: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    want = compute()
    torch.manual_seed(0)
    with Plainly():
        got = compute()
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_questions_of_fake_tensors_are_answered() -> None:
    """Check `prim.device`, by which torch asks for a fake tensor's device past its dispatcher."""
    with FakeTensorMode(), Plainly():
        fake = torch.empty(2, device="cuda")
        assert torch.ops.prim.device.default(fake) == torch.device("cuda", 0)
        assert (fake + 1)[:1].device.type == "cuda"
