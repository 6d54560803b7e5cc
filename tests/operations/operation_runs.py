"""A run of a case: forward, and backward in one of several ways."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from operation_cases import Case, differentiable, values_in
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from hf_memopt.autograd_state import strided_parts

# Enough is saved behind the operation under test to move all earlier saves out of the window of copies under way: while
# its source is still on the device, a wrong copy would go unnoticed.
_BALLAST_OPERATIONS = 3
_BALLAST_FACTOR = 2  # times the inputs' bytes
_SMALLEST_BALLAST_BYTES = 16384

Call = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """Settings of a run: `backward` "once" (behind the context), "inside" it, "twice" (one graph), "second" (order)."""

    autocast: bool = False
    checkpointed: bool = False
    backward: str = "once"

    def __str__(self) -> str:
        names = {"autocast": self.autocast, "checkpointed": self.checkpointed, self.backward: self.backward != "once"}
        return " ".join(name for name, is_set in names.items() if is_set) or "plain"


PLAIN, CHECKPOINTED = Setting(), Setting(checkpointed=True)
SETTINGS = (
    PLAIN,
    Setting(autocast=True),
    Setting(backward="inside"),
    Setting(backward="twice"),
    Setting(backward="second"),
    CHECKPOINTED,
    Setting(checkpointed=True, autocast=True),
    Setting(checkpointed=True, backward="twice"),
    Setting(checkpointed=True, backward="second"),
)


def run(
    case: Case, setting: Setting, context: AbstractContextManager[Any] | None = None, call: Call | None = None
) -> list[Any]:
    """Return results and gradients; `context` is around forward, and a backward that is inside or differentiated."""
    case.reset()
    with _uninitialised_is_nan() if case.fills_memory else nullcontext():
        return _run(
            case, setting, context or nullcontext(), call or (_checkpointed if setting.checkpointed else _plainly)
        )


def _run(case: Case, setting: Setting, context: AbstractContextManager[Any], call: Call) -> list[Any]:
    second = setting.backward == "second"
    ballast = _ballast(case)
    leaves = [*case.all_leaves, ballast]
    gradients: list[Tensor | None] = []
    with context:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            results = call(case.function, *case.inputs())
            ends = [torch.tanh(output * _weight(output)) for output in map(_dense, differentiable(results))]
            ends.append(_behind(ballast, call))
        if setting.backward in ("inside", "second"):
            gradients = _gradients(ends, leaves, create_graph=second)
    if second:
        bends = [_dense(each).abs().square() for each in gradients if each is not None and each.requires_grad]
        gradients += _gradients(bends, leaves)
    if setting.backward == "twice":
        gradients = _gradients(ends, leaves, retain_graph=True)
    if setting.backward in ("once", "twice"):
        gradients = gradients + _gradients(ends, leaves)
    return values_in(results) + [None if each is None else each.detach() for each in gradients]


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _plainly(function: Call, *inputs: Tensor) -> Any:
    return function(*inputs)


def _checkpointed(function: Call, *inputs: Tensor) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def _gradients(ends: list[Tensor], leaves: list[Tensor], **options: Any) -> list[Tensor | None]:
    ones = [torch.ones_like(end) for end in ends]
    return list(grad(ends, leaves, ones, allow_unused=True, **options))


def _weight(output: Tensor) -> Tensor:
    values = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return values.to(output.dtype).requires_grad_()


def _ballast(case: Case) -> Tensor:
    num_bytes = _BALLAST_FACTOR * sum(_dense(each).nbytes for each in case.all_leaves)
    return torch.ones(max(num_bytes, _SMALLEST_BALLAST_BYTES) // 4, requires_grad=True)


def _behind(ballast: Tensor, call: Call) -> Tensor:
    for _ in range(_BALLAST_OPERATIONS):
        ballast = call(torch.sigmoid, ballast)
    return ballast


def _dense(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.complex32:  # a type in which torch computes almost nothing
        tensor = tensor.to(torch.complex64)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same(first: list[Any], second: list[Any]) -> bool:
    """Return whether two runs have bitwise equal results; all NaN are equal."""
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and (first == second or first != first)
    if (first.layout, first.shape, first.dtype) != (second.layout, second.shape, second.dtype):
        return False
    return all(_same_bits(a, b) for a, b in zip(_parts(first), _parts(second), strict=True))


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors inside a tensor."""
    return [_dense(part) for part in strided_parts(tensor)]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    first, second = (
        each.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for each in (first, second)
    )
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not first.is_floating_point():
        return torch.equal(first, second)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[first.element_size()]
    equal_bits = first.view(bits) == second.view(bits)
    return bool((equal_bits | (first.isnan() & second.isnan())).all())
