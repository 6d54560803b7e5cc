"""The operations of a random program's lines, called with the run, the tensors that they read, and options.

The number of rows R differs from pass to pass: in shapes, -1 stands for R, -2 for a half of R, and so on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn.functional import layer_norm, linear, silu
from torch.utils.checkpoint import checkpoint

Shape = tuple[int, int]


class Silu(Function):
    """A SiLU whose backward returns a new tensor, or overwrites its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(x)
        return silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _written(x, _slope(x) * grad, ctx.how), None


class SiluOfAttribute(Function):
    """A SiLU that keeps its input as an attribute, and overwrites the input in backward, unseen by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _written(ctx.x, _slope(ctx.x) * grad, "data")


class GradientInForward(Function):
    """A loss per row whose forward overwrites its input with the gradient, as fused cross entropies do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh().sum(1, keepdim=True)
        x.data.copy_(1 - x.tanh().square())
        ctx.save_for_backward(x.detach())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grad


class Assign(Function):
    """A write to a part of a buffer past autograd's count of modifications, as in torchdiffeq's solvers."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, value: Tensor, part: str) -> Tensor:
        ctx.part = part
        _part(buffer.data, part).copy_(value)
        return buffer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, _part(grad, ctx.part), None


def _slope(x: Tensor) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 + x * (1 - gate))


def _written(x: Tensor, gradient: Tensor, how: str) -> Tensor:
    if how == "aten":
        return x.copy_(gradient)
    if how == "data":
        x.data.copy_(gradient)
        return x.detach()
    return gradient


def _part(x: Tensor, part: str) -> Tensor:
    rows, columns = x.shape
    return {
        "top": x[: rows // 2], "bottom": x[rows // 2 :], "left": x[:, : columns // 2], "right": x[:, columns // 2 :],
    }[part]  # fmt: skip


def _half(size: int) -> int:
    return size // 2 if size > 0 else size * 2


def part_shape(shape: Shape, part: str) -> Shape:
    rows, columns = shape
    return (_half(rows), columns) if part in ("top", "bottom") else (rows, _half(columns))


def _twice(size: int) -> int:
    return size * 2 if size > 0 else size // 2


def twice_shape(shape: Shape, part: str) -> Shape:
    rows, columns = shape
    return (_twice(rows), columns) if part in ("top", "bottom") else (rows, _twice(columns))


# ------------------------------------------------------------------------------------------------ with parameters


def _linear(run: Any, x: Tensor, number: int = 0) -> Tensor:
    weight, bias = run.linear(x.shape[1], number, x.dtype)
    return linear(x, weight, bias)


def _scale(run: Any, x: Tensor) -> Tensor:
    return x * run.parameter(("scale", x.shape[1], x.dtype), (x.shape[1],))


def _block(run: Any, x: Tensor) -> Tensor:
    return torch.tanh(_linear(run, silu(_linear(run, x, 0)), 1))


def _jvp(run: Any, x: Tensor) -> Tensor:
    x = x.detach()
    return torch.func.jvp(lambda x: _block(run, x), (x,), (torch.ones_like(x),))[1]


def _dual(run: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(_block(run, forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return tangent.clone()


# ------------------------------------------------------------------------------------------------ layouts


def _unsafe(run: Any, x: Tensor, part: str) -> Tensor:
    return x.unsafe_chunk(2, 0 if part in ("top", "bottom") else 1)[part in ("bottom", "right")]


def _strided(run: Any, x: Tensor) -> Tensor:
    rows, columns = x.shape
    return x.as_strided((rows // 2, columns), (2 * x.stride(0), x.stride(1)), x.storage_offset() + x.stride(0))


def _fill(run: Any, buffer: Tensor, value: Tensor, part: str) -> None:
    _part(buffer, part).copy_(value)


def _fill_data(run: Any, buffer: Tensor, value: Tensor, part: str) -> None:
    _part(buffer.data, part).copy_(value.detach())


def _buffer(run: Any, x: Tensor, part: str) -> Tensor:
    rows, columns = x.shape
    return x.new_zeros((2 * rows, columns) if part in ("top", "bottom") else (rows, 2 * columns))


def _grad(run: Any, y: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.square().mean(), x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if gradient is None else gradient


@dataclass(frozen=True)
class Operation:
    """A kind of line; a `group` is exchangeable. If not `makes`, a line changes its first operand or runs backward."""

    function: Callable[..., Any]
    text: str
    group: str = "unary"
    makes: bool = True
    weight: int = 1
    feature: str = ""


def _unary(name: str, **options: Any) -> Operation:
    function = getattr(torch, name)
    return Operation(lambda run, x: function(x), f"{name}({{0}})", **options)


def _method(name: str, *arguments: Any) -> Operation:
    text = f"{{0}}.{name}({', '.join(map(str, arguments))})"
    return Operation(lambda run, x: getattr(x, name)(*arguments), text, "in place", makes=False, feature="in place")


OPERATIONS: dict[str, Operation] = {
    "linear": Operation(_linear, "linear{1}({0})", "linear", weight=4),
    "scale": Operation(_scale, "{0} * scale", weight=4),
    **{name: _unary(name, weight=2) for name in ("tanh", "sigmoid", "clone")},
    **{name: _unary(name) for name in ("exp", "relu", "sin", "square")},
    "silu": Operation(lambda run, x: silu(x), "silu({0})", weight=2),
    "norm": Operation(lambda run, x: layer_norm(x, x.shape[-1:]), "layer_norm({0})"),
    "double": Operation(lambda run, x: x.double(), "{0}.double()", "double"),
    "mul": Operation(lambda run, x, y: x * y, "{0} * {1}", "binary", weight=4),
    "add": Operation(lambda run, x, y: x + y, "{0} + {1}", "binary"),
    "gram": Operation(lambda run, x: x @ x.t() / x.shape[1], "gram({0})", "gram"),
    "part": Operation(lambda run, x, part: _part(x, part), "{0}[{1}]", "part", weight=3),
    "unsafe": Operation(_unsafe, "unsafe_chunk({0})[{1}]", "part"),
    "strided": Operation(_strided, "{0}.as_strided(odd rows)", "strided"),
    "t": Operation(lambda run, x: x.t(), "{0}.t()", "t"),
    "expand": Operation(lambda run, x: x[:1].expand(x.shape), "{0}[:1].expand({0}.shape)"),
    "detach": Operation(lambda run, x: x.detach(), "{0}.detach()", "detach"),
    # -------------------------------------------------- in place, seen by autograd or not
    "tanh_": _method("tanh_"),
    "sigmoid_": _method("sigmoid_"),
    "relu_": _method("relu_"),
    "mul_": _method("mul_", 0.5),
    "add_": Operation(lambda run, x, y: x.add_(y), "{0}.add_({1})", "in place binary", False, feature="in place"),
    "data.mul_": Operation(
        lambda run, x: x.data.mul_(0.5), "{0}.data.mul_(0.5)", "in place", False, weight=2, feature="data"
    ),
    "buffer": Operation(_buffer, "a buffer of which {0} is the {1}", "buffer", weight=3),
    "fill": Operation(_fill, "{0}[{2}] = {1}", "fill", False, feature="in place"),
    "fill.data": Operation(_fill_data, "{0}.data[{2}] = {1}", "fill", False, feature="data"),
    "assign": Operation(
        lambda run, buffer, x, part: Assign.apply(buffer, x, part), "assign({0}, {1}, {2})", "assign", feature="data"
    ),
    # -------------------------------------------------- custom functions
    "fresh": Operation(lambda run, x: Silu.apply(x, "fresh"), "custom_silu({0})"),
    "aten": Operation(
        lambda run, x: Silu.apply(x, "aten"), "silu_writes_its_input_in_backward({0})", weight=2, feature="aten"
    ),
    "by data": Operation(
        lambda run, x: Silu.apply(x, "data"), "silu_writes_its_input_by_data_in_backward({0})", weight=2, feature="data"
    ),
    "attribute": Operation(
        lambda run, x: SiluOfAttribute.apply(x), "silu_writes_its_attribute_by_data_in_backward({0})", feature="data"
    ),
    "fused": Operation(
        lambda run, x: GradientInForward.apply(x), "loss_writes_its_input_in_forward({0})", "fused", feature="data"
    ),
    # -------------------------------------------------- graphs within graphs
    "checkpoint": Operation(
        lambda run, x: checkpoint(lambda x: _block(run, x), x, use_reentrant=False), "checkpoint(block, {0})", "linear"
    ),
    "reentrant": Operation(
        lambda run, x: checkpoint(lambda x: _block(run, x), x, use_reentrant=True),
        "checkpoint(block, {0}, use_reentrant=True)", "linear",
    ),
    "jvp": Operation(_jvp, "jvp(block, {0}.detach(), ones)", "linear", feature="forward AD"),
    "dual": Operation(_dual, "tangent(block(make_dual({0}, ones)))", "linear", feature="forward AD"),
    "grad": Operation(
        _grad, "grad({0}.square().mean(), {1}, create_graph=True)", "grad", weight=2, feature="double backward"
    ),
    "backward": Operation(lambda run, x: run.backward(x), "{0}.mean().backward()", "backward", False),
    "backward, retained": Operation(
        lambda run, x: run.backward(x, retain_graph=True), "{0}.mean().backward(retain_graph=True)", "backward", False,
        feature="retained",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a program; `target` is "" for a line without a result."""

    target: str
    operation: str
    operands: tuple[str, ...]
    options: tuple[Any, ...] = ()

    def __str__(self) -> str:
        made = f"{self.target} = " if self.target else ""
        return made + OPERATIONS[self.operation].text.format(*self.operands, *self.options)


def last_uses(lines: Sequence[Line], kept: Sequence[str]) -> list[list[str]]:
    """Return for each line the names that no later line reads, without the names in `kept`."""
    seen, dying = set(kept), []
    for line in reversed(lines):
        names = [name for name in (*line.operands, line.target) if name and name not in seen]
        seen.update(names)
        dying.append(list(dict.fromkeys(names)))
    return dying[::-1]
