from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_memopt.planning.accounting.operation import Operation
from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.simulation.virtual_time import flops_per_s, starts_kernel, work_of

AMPERE, TURING = CARDS["rtx3090"], CARDS["t4"]
_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def square(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(64, 64, dtype=dtype, device="meta")


def product(dtype: torch.dtype, card: Any) -> Any:
    return work_of(Operation.of(_aten.mm.default, (square(dtype), square(dtype)), {}, square(dtype)), card)


def test_a_product_has_its_arithmetic_and_its_bytes() -> None:
    work = product(torch.float16, TURING)
    assert work == ("matrix", "half", 2 * 64**3, 3 * 64 * 64 * 2)
    assert flops_per_s(work, TURING) == TURING.half_flops


@pytest.mark.parametrize(
    ("dtype", "told", "card", "expected"),
    [
        (torch.bfloat16, "highest", AMPERE, "half"),
        (torch.bfloat16, "highest", TURING, "float32"),
        (torch.float32, "highest", AMPERE, "float32"),
        (torch.float32, "high", AMPERE, "tf32"),
        (torch.float32, "high", TURING, "float32"),
    ],
)
def test_tensor_cores_take_what_the_card_and_torch_allow(
    dtype: torch.dtype, told: str, card: Any, expected: str
) -> None:
    torch.set_float32_matmul_precision(told)
    work = product(dtype, card)
    assert work.precision == expected
    speed = {"half": card.half_flops, "tf32": card.half_flops / 2, "float32": card.float32_flops}[expected]
    assert flops_per_s(work, card) == speed


def test_convolutions_use_tf32_without_being_told() -> None:
    image, kernel = torch.empty(1, 8, 16, 16, device="meta"), torch.empty(8, 8, 3, 3, device="meta")
    args = (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    operation = Operation.of(_aten.convolution.default, args, {}, image)
    work = work_of(operation, AMPERE)
    assert (work.kind, work.precision, work.flops) == ("convolution", "tf32", 2 * 8 * 16 * 16 * 8 * 9)
    older = work_of(operation, replace(AMPERE, compute_capability=(7, 5)))
    assert older.precision == "float32"


def test_what_does_no_arithmetic_moves_memory() -> None:
    matrix = square(torch.float32)
    work = work_of(Operation.of(_aten.add.Tensor, (matrix, matrix), {}, matrix), AMPERE)
    assert (work.kind, work.flops, work.num_bytes) == ("memory", 0.0, 3 * 64 * 64 * 4)


def test_views_and_empty_memory_start_no_kernel() -> None:
    assert not starts_kernel(_aten.t.default)
    assert not starts_kernel(_aten.empty_like.default)
    assert starts_kernel(_aten.add.Tensor)
