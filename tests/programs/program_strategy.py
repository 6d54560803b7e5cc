"""Random programs: a few lines that build graphs, and passes that run them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from program_operations import OPERATIONS, Line, Shape, part_shape, twice_shape

FEATURES = ("aten", "data", "in place", "forward AD", "slices", "other bodies", "double backward", "retained", "next")
COPIERS = ("early", "late", "random", "slices")
PARTS = ("left", "right", "top", "bottom")
_SIZES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Body:
    """The lines of a pass: `x` is the input, and the mean of each of `losses` is a loss."""

    lines: tuple[Line, ...]
    losses: tuple[str, ...]

    def __str__(self) -> str:
        lines = [*map(str, self.lines), "return " + " + ".join(f"{name}.mean()" for name in self.losses)]
        return "\n".join(f"    {line}" for line in lines)


@dataclass(frozen=True)
class Pass:
    """A pass in one context. Backward comes inside the context, after it, with the next pass's, twice, or never."""

    body: int = 0
    rows: int = 8
    backward: str = "after"
    steps: bool = False

    def __str__(self) -> str:
        return f"body {self.body}, R={self.rows}, backward {self.backward}{', SGD step' * self.steps}"


@dataclass(frozen=True)
class Program:
    bodies: tuple[Body, ...]
    passes: tuple[Pass, ...]
    copier: str
    seed: int
    is_known: bool
    frees: bool

    def __str__(self) -> str:
        bodies = [f"def body_{number}(x):\n{body}" for number, body in enumerate(self.bodies)]
        settings = f"copier {self.copier}, plan {self.seed}, {'model given' if self.is_known else 'no model'}"
        return "\n".join([*bodies, *map(str, self.passes), settings + (", locals die" if self.frees else "")])

    __repr__ = __str__


@dataclass
class _Variable:
    name: str
    shape: Shape
    is_double: bool
    has_grad: bool
    ancestors: frozenset[str]
    is_buffer: bool = False
    is_spent: bool = False


class _Writer:
    """A writer of lines with operands that fit."""

    def __init__(self, draw: Any, without: frozenset[str]) -> None:
        self._draw = draw
        self._weighted = [
            name for name, operation in OPERATIONS.items() if operation.feature not in without or not operation.feature
            for _ in range(operation.weight)
        ]  # fmt: skip
        self.lines: list[Line] = []
        self.variables = [_Variable("x", (-1, 16), False, False, frozenset("x"))]

    def write_several(self, without: frozenset[str]) -> None:
        """Write one of the patterns that single lines rarely form."""
        square = [each for each in self.variables if not each.is_spent and each.shape == (-1, 16)]
        first = self._pick([each for each in square if each.has_grad])
        if first is None:
            return
        pattern = self._draw(st.integers(0, 4))
        near, far = self._draw(st.sampled_from([("left", "right"), ("top", "bottom")]))
        if pattern == 4:
            # One half of a buffer is saved, and the other half is overwritten after a read.
            buffer = self._then("buffer", [first], near)
            for part in (near, far):
                self._then("fill.data", [buffer, first], part)
            used = self._then("scale", [self._then("part", [buffer], near)])
            read = self._then("tanh", [self._then("part", [buffer], far)])
            self._then("add", [used, self._then("scale", [read])])
            self._then("fill.data", [buffer, used], far)
        elif pattern >= 2:
            # A buffer is filled half by half, and each half is used at once.
            how = self._draw(st.sampled_from([name for name in ("assign", "fill.data") if "data" not in without]))
            buffer = self._then("buffer", [first], near)
            buffer = self._then(how, [buffer, first], near)
            part = self._then("part", [buffer], near)
            used = self._then("scale", [part])
            buffer = self._then(how, [buffer, used], far)
            self._then("add", [used, self._then("part", [self._then("scale", [buffer])], far)])
        else:
            # A function overwrites in backward the tensor from which another saved tensor can be recomputed.
            ways = {"aten": "aten", "by data": "data", "attribute": "data"}
            how = self._draw(st.sampled_from([name for name, feature in ways.items() if feature not in without]))
            read = self._then(self._draw(st.sampled_from(["tanh", "sigmoid", "exp"])), [first])
            self._then("add", [self._then("scale", [read]), self._then(how, [first])])

    def _then(self, operation: str, operands: list[_Variable], *options: str) -> _Variable:
        shape = operands[0].shape
        if operation in ("part", "buffer"):
            shape = (part_shape if operation == "part" else twice_shape)(shape, options[0])
        self.add(operation, operands, shape, options)
        return self.variables[-1] if OPERATIONS[operation].makes else operands[0]

    def write(self) -> None:
        operation = self._draw(st.sampled_from(self._weighted))
        found = self._operands(operation)
        if found is not None:
            self.add(operation, *found)

    def add(self, operation: str, operands: list[_Variable], shape: Shape | None, options: tuple[Any, ...]) -> None:
        first, group = operands[0], OPERATIONS[operation].group
        ancestors = frozenset().union(*(variable.ancestors for variable in operands))
        has_grad = any(variable.has_grad for variable in operands)
        if OPERATIONS[operation].makes:
            assert shape is not None
            made = _Variable(
                chr(ord("a") + len(self.variables) - 1), shape, first.is_double or group == "double",
                (has_grad or group == "linear" or operation == "scale") and operation not in ("detach", "buffer"),
                frozenset() if operation in ("detach", "buffer") else ancestors,
                is_buffer=operation in ("buffer", "assign"),
            )  # fmt: skip
            made.ancestors |= {made.name}
            self.variables.append(made)
        elif operation.startswith("backward"):
            for variable in self.variables:
                variable.is_spent |= operation == "backward" and bool(variable.ancestors & first.ancestors - {"x"})
        else:
            first.has_grad |= has_grad and operation != "fill.data"
            first.ancestors |= ancestors
        names = tuple(variable.name for variable in operands)
        self.lines.append(Line(made.name if OPERATIONS[operation].makes else "", operation, names, options))

    def _pick(self, variables: Iterator[_Variable] | list[_Variable]) -> _Variable | None:
        fitting = [variable for variable in variables if not variable.is_spent][::-1]
        return self._draw(st.sampled_from(fitting)) if fitting else None

    def _operands(self, operation: str) -> tuple[list[_Variable], Shape | None, tuple[Any, ...]] | None:
        group, some = OPERATIONS[operation].group, self.variables
        options: tuple[Any, ...] = ()
        if operation == "reentrant":  # since reentrant checkpoints warn of inputs without gradient
            first = self._pick([each for each in some if each.shape[1] in _SIZES and each.has_grad])
        elif group in ("linear", "fused") or operation == "scale":
            first = self._pick([each for each in some if each.shape[1] in _SIZES])
        elif group == "double":
            first = self._pick([each for each in some if not each.is_double])
        elif group == "part":
            first = self._pick([each for each in some if min(each.shape) >= -2])
        elif group in ("fill", "assign"):
            first = self._pick([each for each in some if each.is_buffer])
        elif group in ("grad", "backward"):
            first = self._pick([each for each in some if each.has_grad])
        elif group == "buffer":
            first = self._pick([each for each in some if max(each.shape) <= 16])
        elif operation == "detach":
            first = self._draw(st.sampled_from(some[::-1]))
        else:
            first = self._pick(some)
        if first is None:
            return None
        shape: Shape | None = first.shape
        operands = [first]
        if group in ("binary", "in place binary"):
            operands.append(self._pick([e for e in some if (e.shape, e.is_double) == (first.shape, first.is_double)]))
        elif group == "grad":
            names = first.ancestors - {"x"}
            operands.append(self._pick([each for each in some if each.name in names and each.has_grad]))
            shape = operands[1].shape if operands[1] else None
        elif group == "linear":
            options = (self._draw(st.integers(0, 1)),) if operation == "linear" else ()
        elif group == "gram":
            shape = first.shape[0], first.shape[0]
        elif group == "part":
            options = (self._draw(st.sampled_from(PARTS)),)
            shape = part_shape(first.shape, options[0])
        elif group == "strided":
            shape = part_shape(first.shape, "top")
        elif group == "t":
            shape = first.shape[::-1]
        elif group == "fused":
            shape = first.shape[0], 1
        elif group == "buffer":
            options = (self._draw(st.sampled_from(PARTS)),)
            shape = twice_shape(first.shape, options[0])
        elif group in ("fill", "assign"):
            options = (self._draw(st.sampled_from(PARTS)),)
            wanted = part_shape(first.shape, options[0]), first.is_double
            operands.append(self._pick([each for each in some if (each.shape, each.is_double) == wanted]))
        if None in operands or (shape is not None and (0 in shape or 2 in shape or min(shape) < -4)):
            return None
        return operands, shape, options


@st.composite
def bodies(draw: Any, without: frozenset[str]) -> Body:
    writer = _Writer(draw, without)
    writer.add("linear", writer.variables[:1], (-1, 16), (0,))
    for _ in range(draw(st.integers(1, 14))):
        if "data" not in without and draw(st.integers(0, 11)) == 11:
            writer.write_several(without)
        else:
            writer.write()
    fitting = [each.name for each in writer.variables if each.has_grad and not each.is_spent][::-1]
    if not fitting:
        writer.add("linear", writer.variables[:1], (-1, 16), (1,))
        fitting = [writer.variables[-1].name]
    losses = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3, unique=True))
    return Body(tuple(writer.lines), tuple(losses))


@st.composite
def exchanged(draw: Any, body: Body, without: frozenset[str]) -> Body:
    """Draw a body with some operations exchanged, which saves about as many tensors of the same sizes."""
    lines = []
    for line in body.lines:
        now = OPERATIONS[line.operation]
        same = [
            name for name, other in OPERATIONS.items()
            if other.group == now.group and (not other.feature or other.feature not in without)
        ]  # fmt: skip
        change = now.group in ("unary", "in place", "fill") and draw(st.booleans())
        lines.append(replace(line, operation=draw(st.sampled_from(same))) if change else line)
    if "in place" not in without and draw(st.booleans()):
        # One line's input is modified in place after the read.
        reader = draw(st.integers(0, len(lines) - 1))
        names = [name for name in lines[reader].operands if name != "x"]
        if names:
            operation = draw(st.sampled_from(["sigmoid_", "tanh_", "relu_", "mul_"]))
            lines.insert(reader + 1, Line("", operation, (names[0],)))
    return Body(tuple(lines), body.losses)


@st.composite
def programs(draw: Any, without: frozenset[str] = frozenset()) -> Program:
    first = draw(bodies(without))
    both = (first,)
    if "other bodies" not in without and draw(st.booleans()):
        both = (first, draw(st.one_of(exchanged(first, without), bodies(without))))
    num_passes = draw(st.integers(3, 6))
    ways = ["after"] * 6 + ["inside", "inside", "next", "twice", "never"]
    left_out = {"retained": "twice", "next": "next"}
    backward = st.sampled_from([way for way in ways if way not in {left_out.get(name) for name in without}])
    passes = tuple(
        Pass(
            draw(st.sampled_from([0, 0, len(both) - 1])) if number > 1 else 0,
            draw(st.sampled_from([8, 8, 8, 16])),
            draw(backward),
            draw(st.sampled_from([False, False, False, True])),
        )
        for number in range(num_passes)
    )
    copier = draw(st.sampled_from([name for name in COPIERS if name not in without]))
    return Program(both, passes, copier, draw(st.integers(0, 7)), draw(st.booleans()), draw(st.booleans()))
