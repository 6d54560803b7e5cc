"""The building blocks of random models whose frozen weights stream: modules, readers, results, hooks and memory.

Each part maps x, `(2, 3, 8)`, to a tensor of that shape.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, TABLE = 3, 8, 32


class BombError(Exception):
    """An exception of the model's own code."""


class Moment:
    """What all parts of a model know of the present step.

    Attributes:
        step: its number.
        bomb: where an exception comes ("forward" or "backward"), in which part, and its class; None for nowhere.
        visit: makes the context in which a module's weights may be read.
        kept: tensors that parts keep outside of themselves.
    """

    def __init__(self) -> None:
        self.step = 0
        self.bomb: tuple[str, int, type[BaseException]] | None = None
        self.visit: Callable[[nn.Module], Any] = lambda module: nullcontext()
        self.kept: dict[int, Tensor] = {}

    def explode(self, where: str, number: int) -> None:
        if self.bomb is not None and self.bomb[:2] == (where, number):
            raise self.bomb[2]


class Saved(Function):
    """A product that saves its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_weight = (x.flatten(0, 1).t() @ grad.flatten(0, 1).to(x.dtype)) if ctx.needs_input_grad[1] else None
        return grad @ weight.t().to(grad.dtype), to_weight


class Unsaved(Function):
    """A product that reads the weight through its module, in backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x @ module.w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.module.w.detach().t().to(grad.dtype), None


# ------------------------------------------------------------------------------------------------ modules


def _matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(WIDTH, WIDTH, dtype=dtype) / WIDTH**0.5


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "w": lambda: nn.Parameter(_matrix()),
    "v": lambda: nn.Parameter(_matrix()),
    "lazy_conj": lambda: nn.Parameter(_matrix(torch.cfloat).conj()),
    "lazy_neg": lambda: nn.Parameter(_matrix(torch.cfloat).conj().imag),
    "ints": lambda: _constant(torch.randint(-128, 127, (WIDTH, WIDTH), dtype=torch.int8)),
    "bools": lambda: _constant(torch.rand(WIDTH, WIDTH) < 0.5),
    "list": lambda: nn.ParameterList(nn.Parameter(_matrix()) for _ in range(3)),
    "int_list": lambda: nn.ParameterList(WEIGHTS["ints"]() for _ in range(3)),
    "children_": lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)),
}


class Own(nn.Module):
    """A module with weights of its own, which `read` uses."""

    def __init__(self, names: str, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name in names.split():
            setattr(self, name, WEIGHTS[name]())
        self.read = read
        self.moment = Moment()

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)

    @property
    def turn(self) -> int:
        return self.moment.step % 3


def _kept_from_first_call(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "turned"):
        m.turned = m.w.t()
    return x @ m.turned


def _also_from_step_2(m: Any, x: Tensor) -> Tensor:
    y = x @ m.w
    return y * (m.v > 0)[:ROWS] if m.moment.step >= 2 else y


OWN: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "x @ w": ("w", lambda m, x: x @ m.w),
    "(x @ w).tanh() @ v": ("w v", lambda m, x: (x @ m.w).tanh() @ m.v),
    "x @ (w * v.t())": ("w v", lambda m, x: x @ (m.w * m.v.t())),
    "view of x @ w": ("w", lambda m, x: (x @ m.w).unsqueeze(1).squeeze(1)),
    "x * w[:3]": ("w", lambda m, x: x * m.w[:ROWS]),
    "x * (w.abs() > 0.3)": ("w", lambda m, x: x * (m.w.abs() > 0.3)[:ROWS]),
    "x @ w * (v > 0 from step 2)": ("w v", _also_from_step_2),
    "x @ ints": ("ints", lambda m, x: x @ m.ints.to(x.dtype) / 256),
    "where(bools, x, w)": ("bools w", lambda m, x: torch.where(m.bools[:ROWS], x, m.w[:ROWS])),
    "x @ lazy_conj": ("lazy_conj", lambda m, x: torch.view_as_real(x.to(torch.cfloat) @ m.lazy_conj).sum(-1)),
    "x @ lazy_neg": ("lazy_neg", lambda m, x: x @ m.lazy_neg),
    "x @ list[step]": ("list", lambda m, x: x @ m.list[m.turn]),
    "x @ int_list[step]": ("int_list", lambda m, x: x @ m.int_list[m.turn].to(x.dtype) / 256),
    "x @ children[step].weight": ("children_", lambda m, x: x @ m.children_[m.turn].weight.t()),
    "children[step](x)": ("children_", lambda m, x: m.children_[m.turn](x)),
    "x @ turned, kept from the first call": ("w", _kept_from_first_call),
    "function that saves w": ("w", lambda m, x: Saved.apply(x, m.w)),
    "function that keeps the module": ("w", lambda m, x: Unsaved.apply(x, m)),
}  # fmt: skip


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 8), nn.Parameter(torch.randn(WIDTH, 2) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def _with_adapter() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(module, "weight", _LowRank())
    return module


class PackedLSTM(nn.LSTM):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        packed = pack_padded_sequence(x, torch.tensor([ROWS, 2]), batch_first=True)
        return pad_packed_sequence(super().forward(packed)[0], batch_first=True, total_length=ROWS)[0]


CALLED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "conv": lambda: nn.Conv1d(ROWS, ROWS, 3, padding=1),
    "layer norm": lambda: nn.LayerNorm((ROWS, WIDTH)),
    "batch norm": lambda: nn.BatchNorm1d(ROWS),
    "embedding": lambda: nn.Embedding(TABLE, WIDTH),
    "small embedding": lambda: nn.Embedding(4, WIDTH),
    "embedding with max_norm": lambda: nn.Embedding(TABLE, WIDTH, max_norm=1.0),
    "embedding bag": lambda: nn.EmbeddingBag(TABLE, WIDTH),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "packed lstm": lambda: PackedLSTM(WIDTH, WIDTH, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "linear, relu_, linear": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "linear with a low-rank parametrization": _with_adapter,
}
KINDS = (*CALLED, *OWN)
# Hold no state, so that threads may share them.
FOR_THREADS = ("linear", "linear without bias", "conv", "layer norm", "embedding", "attention", "lstm", "x @ w")


def _arguments(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    if isinstance(module, nn.MultiheadAttention):
        return x, x, x
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ((x.detach().float().sum(-1) * 100).long() % module.num_embeddings,)
    return (x,)


def result(module: nn.Module, x: Tensor, call: Callable[..., Any]) -> Any:
    """Call a module, or its forward, with the arguments that it takes."""
    y = call(*_arguments(module, x))
    y = y[0] if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and isinstance(y, tuple) else y
    return x + y.view(len(x), -1, WIDTH) if isinstance(module, nn.Embedding | nn.EmbeddingBag) else y


# ------------------------------------------------------------------------------------------------ results


@dataclass
class _Fields:
    y: Any


class _Object:
    def __init__(self, y: Any) -> None:
        self.y = y


def _keep(module: Any, y: Tensor) -> Tensor:
    module.kept = y
    return y


# How a module hands its result out, and how its caller finds it there.
FORMS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Any], Tensor]]] = {
    "tuple": (lambda m, y: (y, None), lambda m, out: out[0]),
    "dict": (lambda m, y: {"y": y}, lambda m, out: out["y"]),
    "dataclass": (lambda m, y: _Fields(y), lambda m, out: out.y),
    "object": (lambda m, y: _Object(y), lambda m, out: out.y),
    "view": (lambda m, y: y.unsqueeze(0).squeeze(0), lambda m, out: out),
    "attribute, output unused": (lambda m, y: _keep(m, y).sin(), lambda m, out: m.kept),
    "attribute, output detached": (lambda m, y: _keep(m, y).detach(), lambda m, out: out + m.kept),
    "attribute and output": (lambda m, y: _keep(m, y).sin(), lambda m, out: out + m.kept),
    "kept by the parent": (
        lambda m, y: m.moment.kept.update({id(m): y}), lambda m, out: m.moment.kept.pop(id(m)),
    ),
}  # fmt: skip


def formed(module: nn.Module, form: str, number: int, moment: Moment) -> nn.Module:
    """Have a module hand its result out in a form, and explode where the moment says so."""
    kind: Any = type(module)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        y = kind.forward(self, *arguments, **options)
        moment.explode("forward", number)
        if not form:
            return y
        return FORMS[form][0](self, y[0] if isinstance(y, tuple) else y)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    module.moment = moment  # type: ignore[assignment]
    return module


# ------------------------------------------------------------------------------------------------ after the call


def _first_column_to_zero(y: Tensor, x: Tensor) -> Tensor:
    y[..., 0] = 0
    return y


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu_": lambda y, x: y.relu_(),
    "mul_(0.5)": lambda y, x: y.mul_(0.5),
    "+= x": lambda y, x: y.add_(x),
    "[..., 0] = 0": _first_column_to_zero,
    "flatten().tanh_()": lambda y, x: y.flatten().tanh_().view(y.shape),
    "relu": lambda y, x: y.relu(),
}


def _slope(weight: Tensor) -> Tensor:
    return 1 + 0.1 * weight.detach().float().mean().tanh()


def _hook_module(hook: str, module: nn.Module, weight: Tensor) -> None:
    def scaled(values: Any) -> Any:
        return (values[0] * _slope(weight), *values[1:]) if isinstance(values[0], Tensor) else None

    if hook == "full backward":
        module.register_full_backward_hook(lambda m, to_inputs, to_outputs: scaled(to_inputs))
    elif hook == "full backward pre":
        module.register_full_backward_pre_hook(lambda m, to_outputs: scaled(to_outputs))
    elif hook == "forward":
        module.register_forward_hook(lambda m, inputs, y: y * _slope(weight) if isinstance(y, Tensor) else None)
    elif hook == "forward pre":
        module.register_forward_pre_hook(lambda m, inputs: scaled(inputs) if inputs[0].is_floating_point() else None)


HOOKS = ("tensor", "gradient", "full backward", "full backward pre", "forward", "forward pre")


class Place(nn.Module):
    """The parent of a part's module: reads it, and goes on with its result."""

    def __init__(self, part: Any, number: int, moment: Moment, explodes: bool) -> None:
        super().__init__()
        self.part, self.number, self.moment = part, number, moment
        module = CALLED[part.kind]() if part.kind in CALLED else Own(*OWN[part.kind])
        self.module = formed(module, part.form, number, moment) if part.form or explodes else module
        if isinstance(module, Own):
            module.moment = moment
        for parameter in module.parameters():
            if parameter.is_floating_point():
                is_frozen = {"all": True, "none": False, "weights": parameter.dim() > 1, "biases": parameter.dim() < 2}
                # Equal zeros or ones would prove nothing.
                parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
                parameter.requires_grad_(not is_frozen[part.frozen])

    def watched(self) -> Tensor | None:
        """Return the weight that hooks read, and whose memory is shared: a frozen one, if there is one."""
        floating = [each for each in self.module.parameters() if each.dtype is torch.float32 and each.dim() > 1]
        return min(floating, key=lambda each: each.requires_grad, default=None)

    def hook(self, weight: Tensor) -> None:
        _hook_module(self.part.hook, self.module, weight)
        if self.part.hook == "gradient":
            for parameter in filter(lambda each: each.requires_grad, self.module.parameters()):
                parameter.register_hook(lambda grad: grad * _slope(weight))

    def read(self, x: Tensor) -> Tensor:
        reads, module = self.part.reads, self.module
        is_called = {"by turns": self.moment.step % 2 == 0, "forward from step 2": self.moment.step < 2}
        with self.moment.visit(module) if reads == "forward in visit" else nullcontext():
            call = module if is_called.get(reads, not reads.startswith("forward")) else module.forward
            take = FORMS[self.part.form][1] if self.part.form else lambda module, out: out
            return result(module, x, lambda *arguments: take(module, call(*arguments)))

    def forward(self, x: Tensor) -> Tensor:
        if self.part.reads == "never":
            return x.tanh()
        if hasattr(self, "alias"):
            with torch.no_grad():
                self.alias.mul_(0.9)
        y = self.read(x)
        if y.requires_grad:
            weight = self.watched()
            if self.part.hook == "tensor" and weight is not None:
                y.register_hook(lambda grad: grad * _slope(weight))
            if self.moment.bomb is not None:
                y.register_hook(lambda grad: self.moment.explode("backward", self.number))
        if hasattr(self, "turned"):
            y = y + self.turned.mean()
        return AFTER[self.part.after](y, x) if self.part.after else y


class Model(nn.Module):
    """Parts one after the other between a linear layer that trains and a frozen one; neighbours share checkpoints."""

    def __init__(self, parts: Any, explode: frozenset[int]) -> None:
        super().__init__()
        self.moment = Moment()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.requires_grad_(False)
        self.places = nn.ModuleList(
            Place(part, number, self.moment, number in explode) for number, part in enumerate(parts)
        )
        earlier = [self.first.weight]
        for place in self.places:
            weight = place.watched()
            if weight is not None:
                same = [each for each in earlier if each.shape == weight.shape]
                if place.part.memory and (same or "earlier" not in place.part.memory):
                    MEMORY[place.part.memory](place, weight, same[-1] if same else None)
                earlier.append(weight)
                place.hook(weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for kind, group in itertools.groupby(self.places, lambda place: place.part.checkpoint):
            region = nn.Sequential(*group).forward
            x = checkpoint(region, x, use_reentrant=kind == "reentrant") if kind else region(x)
        return self.last(x)

    def in_loss(self, x: Tensor) -> Iterator[Tensor]:
        """Read weights outside of all modules."""
        for place in self.places:
            if place.part.reads == "also in the loss":
                yield result(place.module, x, place.module.forward if not place.part.form else place.read).mean()


# ------------------------------------------------------------------------------------------------ memory


def _tie(place: Any, weight: Any, earlier: Any) -> None:
    for module in place.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is weight:
                module._parameters[name] = earlier


def _share_data(place: Any, weight: Any, earlier: Any) -> None:
    weight.data = earlier.data


def _overlap(place: Any, weight: Any, earlier: Any) -> None:
    row = weight.shape[-1]
    memory = torch.randn(weight.numel() + row) / WIDTH**0.5
    weight.data, earlier.data = memory[row:].view(weight.shape), memory[:-row].view(weight.shape)


def _columns_first(place: Any, weight: Any, earlier: Any) -> None:
    weight.data = weight.data.T.contiguous().T if weight.dim() == 2 else weight.data


MEMORY: dict[str, Callable[[Any, Any, Any], object]] = {
    "tied to an earlier weight": _tie,
    "data of an earlier weight": _share_data,
    "overlaps an earlier weight": _overlap,
    "buffer that aliases it is written": lambda place, weight, earlier: place.register_buffer("alias", weight.data[:1]),
    "attribute that aliases it": lambda place, weight, earlier: setattr(place, "turned", weight.detach().mT),
    "columns first": _columns_first,
}
