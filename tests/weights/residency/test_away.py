"""Tests that no function of torch reads a weight that is away: it raises an error with the name, or needs no bytes."""

import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_memopt import StreamedWeights, SyncCopier

ROWS = 4
VALUES = {
    "float32": torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(0)),
    "int64": torch.arange(ROWS * ROWS).view(ROWS, ROWS),
    "bool": torch.arange(ROWS * ROWS).view(ROWS, ROWS) % 3 == 0,
    "complex64": torch.randn(ROWS, ROWS, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)),
}
# They start other programs, wait, or need an interpreter that is not there.
LEFT_OUT = {"__init_subclass__", "__subclasshook__", "__class__", "__new__", "__init__", "backward", "_neg_view"}
# Their results are random, uninitialised, or addresses.
DIFFERENT_EACH_TIME = {
    *("bernoulli", "new", "empty_like", "new_empty", "new_empty_strided", "_cdata"),
    *("__hash__", "__dir__", "__sizeof__", "__dict__", "__module__", "__reduce_ex__"),
}


def streamed(value: Tensor, home: str, disk: Path) -> tuple[nn.Module, StreamedWeights]:
    model = nn.Module()
    model.weight = nn.Parameter(value.clone(), requires_grad=False)
    return model, StreamedWeights(model, home=home, device="cpu", copier=SyncCopier(), disk=disk)


def calls_of(kind: type) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Yield methods and attributes of tensors, called with a few arguments."""
    other = torch.ones(ROWS, ROWS)
    many: list[tuple[Any, ...]] = [(), (1,), (0.5,), (other,), (other > 0,), (0, 1), (torch.float64,), (other, other)]
    many += [(0, torch.zeros(ROWS, dtype=torch.long)), (ROWS, ROWS), ((ROWS, ROWS),), (other > 0, 1.0), ("meta",)]
    for name in sorted(set(dir(kind)) - LEFT_OUT):
        if callable(getattr(kind, name)):
            for number, given in enumerate(many):
                yield f"{name} {number}", lambda tensor, name=name, given=given: getattr(tensor, name)(*given)
        else:
            yield name, lambda tensor, name=name: getattr(tensor, name)


def functions() -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Yield functions of other modules, which users call on weights."""
    yield "is_shared of a view", lambda tensor: tensor.detach().is_shared()
    yield "foreach_norm", lambda tensor: torch._foreach_norm([tensor])
    yield "foreach_lerp_", lambda tensor: torch._foreach_lerp_([torch.zeros(ROWS, ROWS)], [tensor], 0.5)
    yield "equal", lambda tensor: torch.equal(torch.zeros(ROWS, ROWS), tensor)
    yield "linear", lambda tensor: nn.functional.linear(torch.ones(1, ROWS), tensor)
    yield "embedding", lambda tensor: nn.functional.embedding(torch.tensor([1]), tensor)
    yield "operator", lambda tensor: torch.ops.aten.mul.Tensor(tensor, 2)
    yield "zeros_", nn.init.zeros_
    yield "copy to", lambda tensor: torch.zeros(ROWS, ROWS).copy_(tensor)
    yield "stack", lambda tensor: torch.stack([torch.zeros(ROWS, ROWS), tensor])


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.is_meta or second.is_meta:
            return first.shape == second.shape and first.dtype == second.dtype
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first).__eq__(first, second) is not False


def try_all(value: Tensor, home: str, disk: Path, report: Callable[[str], object]) -> None:
    """Report the name of each call before it is made, and each call that reads something else than the weight."""
    for view in (False, True):
        model, base = streamed(value, home, disk)
        for name, call in (*calls_of(Tensor), *functions()):
            try:
                want = call(nn.Parameter(value.clone(), requires_grad=False))
            except Exception:
                continue
            report(f"at {name} {view=}")
            try:
                got = call(model.weight.detach() if view else model.weight)
                if name.partition(" ")[0] not in DIFFERENT_EACH_TIME and not same(want, got):
                    report(f"WRONG {name} {view=} {type(got)}")
            except Exception as error:
                if "'weight' is away" not in str(error) and "'weight' cannot be copied" not in str(error):
                    report(f"UNNAMED {name} {view=} {type(error).__name__} {error}")
            try:
                with base.visit(model):
                    if not torch.equal(model.weight, value):
                        report(f"WRITTEN {name} {view=}")
            except RuntimeError:  # unfrozen or bound to other memory
                model, base = streamed(value, home, disk)


@pytest.mark.sweep(share=1 / 10)
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("dtype", VALUES)
def test_a_weight_that_is_away_raises(dtype: str, home: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        with log.open("w", buffering=1) as file:
            try:
                try_all(VALUES[dtype], home, tmp_path, lambda text: print(text, file=file))
            except BaseException as error:
                print("FAILED", repr(error), file=file)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    lines = log.read_text().splitlines()
    assert status == 0, lines[-1]
    assert [line for line in lines if not line.startswith("at ")] == []
