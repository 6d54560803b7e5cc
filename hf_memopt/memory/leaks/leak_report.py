"""Tensors that stay behind, and their holders, in words: references to an object, as a Python expression."""

import gc
import inspect
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, TracebackType
from typing import Any

import torch

from hf_memopt.memory.leaks.live_storages import GRADIENT, SAVED, WITH_GRAPH, Held, graph_nodes, live_storages
from hf_memopt.transfer.host_arena import HostHoldings
from hf_memopt.units import format_bytes

_MAX_CULPRITS = 6
_MAX_DEPTH = 32
_MAX_BREADTH = 200  # objects followed at each level
_ARROW = " → "
_CLOSURE_MARK = ".__closure__"
_DICT_LOOKUP = re.compile(r"\.__dict__\['(\w+)'\]")
_CLOSURE = re.compile(r"\.__closure__\[(\d+)\]")
_PLAIN = (dict, list, tuple, deque, set, CellType, FrameType, TracebackType)
_OWN_FILES = {str(path) for path in Path(__file__).parent.glob("*.py")}


@dataclass(frozen=True)
class Culprit:
    """Tensors of one kind that stay behind.

    Attributes:
        kind: "tensor", "tensor with its graph", "gradient", "saved for backward", "parameter", or "unreached" for
            memory that an accelerator's allocator counts and neither Python nor autograd reaches.
        shape: shape of one of them; None where they differ. Empty for scalars and for "unreached".
        dtype: as in `torch.float32`; None for "unreached".
        count: number of storages left in the tested steps.
        bytes: their size.
        graph_nodes: autograd nodes that one of them keeps alive.
        held_by: the references to one of them, as a Python expression, or how autograd holds it.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    count: int
    bytes: int
    graph_nodes: int
    held_by: str

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{format_bytes(self.bytes)} {self.kind}\n    {self.held_by}"
        nodes = f", each with {self.graph_nodes} autograd nodes" if self.graph_nodes else ""
        dtype = str(self.dtype).removeprefix("torch.")
        what = f"{self.count} x {self.kind}: {format_shape(self.shape)} {dtype}"
        return f"{what}, {format_bytes(self.bytes)}{nodes}\n    held by {self.held_by}"


@dataclass(frozen=True)
class LeakReport:
    """Verdict on a run of steps; `str` makes a readable page of it.

    Attributes:
        leaking: whether memory stays behind at nearly every step.
        bytes_per_step: median over the tested steps. Small where only autograd graphs stay, whose nodes are no tensors.
        culprits: tensors that stay, the largest first.
        first_step, last_step: the tested steps, counted from 1.
        bytes_freed_by_gc: how much of it one `gc.collect()` freed, because only reference cycles held it.
        sees_allocator: whether an accelerator's allocator was asked too.
        offload: host memory that offloading holds, and how often it has taken some from the first tested step on, as
            batches of other sizes let it; a sound run soon takes no more.
    """

    leaking: bool
    bytes_per_step: float
    culprits: tuple[Culprit, ...]
    first_step: int
    last_step: int
    bytes_freed_by_gc: int
    sees_allocator: bool
    offload: HostHoldings

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}"
        if not self.leaking:
            lines = [f"No memory leak: nothing stays behind regularly in {steps}."]
        else:
            lines = [f"Memory leak: {format_bytes(self.bytes_per_step)} stay behind per step, {steps}."]
            lines += [f"  {culprit}" for culprit in self.culprits]
        if self.bytes_freed_by_gc:
            freed = format_bytes(self.bytes_freed_by_gc)
            lines.append(f"  gc.collect() freed {freed} of it: reference cycles that wait for the garbage collector.")
        if self.offload.num_bytes:
            held = format_bytes(self.offload.num_bytes)
            lines.append(f"Offloading holds {held} of host memory, taken {self.offload.num_allocations} times of late.")
        if not self.sees_allocator:
            lines.append("Not seen on the CPU: memory that neither Python nor an autograd graph reaches.")
        return "\n".join(lines)


class MemoryLeakError(RuntimeError):
    """Memory stays behind at every step. `report` names the tensors and their holders."""

    def __init__(self, report: LeakReport) -> None:
        super().__init__(str(report))
        self.report = report


def unreached(num_bytes: int) -> Culprit:
    remedy = "neither Python nor an autograd graph reaches it: a C++ extension, or a library's workspace"
    return Culprit("unreached", (), None, 0, num_bytes, 0, remedy)


def find_culprits(suspects: dict[int, int], num_samples: int) -> tuple[Culprit, ...]:
    """Describe storages that leak, by address and step of birth, but for rare kinds; takes up to seconds."""
    held = live_storages()
    # The newest last, because `_culprit` describes the last of a group: a list that grows is reached from its end, and
    # in a linked chain the newest object has the shortest way to a name in the program.
    leaked = [(held[address], step) for address, step in sorted(suspects.items(), key=itemgetter(1)) if address in held]
    # Tensors that do not leak must not be held while referrers are searched for.
    del held
    groups = _group(leaked, num_samples / 2, by_shape=True) or _group(leaked, num_samples / 2, by_shape=False)
    groups.sort(key=lambda group: (-_num_bytes(group), -len(group)))
    entries = [entry for entries, _ in leaked for entry in entries]
    return tuple(_culprit(group, entries) for group in groups[:_MAX_CULPRITS])


Storage = list[Held]  # one entry for each kind of holder, Python's first


def _group(leaked: list[tuple[Storage, int]], min_samples: float, by_shape: bool) -> list[list[Storage]]:
    groups: defaultdict[object, list[Storage]] = defaultdict(list)
    births: defaultdict[object, set[int]] = defaultdict(set)
    for storage, step in leaked:
        tensor = storage[0].tensor
        key = (storage[-1].kind, storage[-1].node, tensor.shape if by_shape else tensor.dim(), tensor.dtype)
        groups[key].append(storage)
        births[key].add(step)
    return [group for key, group in groups.items() if len(births[key]) >= min_samples]


def _culprit(group: list[Storage], ignore: list[Held]) -> Culprit:
    entry, held_by = _held_by(group[-1], ignore)
    nodes = sum(1 for _ in graph_nodes([entry.tensor], set())) if entry.kind == WITH_GRAPH else 0
    sizes = zip(*(storage[0].tensor.shape for storage in group), strict=True)
    shape = tuple(size[0] if len(set(size)) == 1 else None for size in sizes)
    return Culprit(entry.kind, shape, entry.tensor.dtype, len(group), _num_bytes(group), nodes, held_by)


def _held_by(storage: Storage, ignore: list[Held]) -> tuple[Held, str]:
    """Return the entry with a holder, Python before autograd: a tensor of Python's may be held by a graph alone."""
    for entry in storage:
        holder = describe_holder(entry.root, ignore)
        if holder is not None:
            return entry, _by_autograd(entry) + holder
    return storage[-1], f"{_by_autograd(storage[-1])}C++ alone"


def _by_autograd(entry: Held) -> str:
    root = f"{format_shape(entry.root.shape)} tensor"
    if entry.kind == GRADIENT:
        return f"the .grad of a {root}: "
    if entry.kind == SAVED:
        return f"{entry.node} in the graph of {'the .grad of ' if entry.root.is_leaf else ''}a {root}: "
    return ""


def _num_bytes(group: list[Storage]) -> int:
    return sum(storage[0].tensor.untyped_storage().nbytes() for storage in group)


def format_shape(shape: tuple[int | None, ...]) -> str:
    """Return `(8, *, 32)`, with a star for a size that differs."""
    return f"({', '.join('*' if size is None else str(size) for size in shape)})"


def describe_holder(thing: object, ignore: Iterable[object] = ()) -> str | None:
    """Return the shortest chain of references from a name in the program to `thing`, but for those in `ignore`.

    For example `errors[3].__traceback__ → hidden of step() (loop.py:9), in main() (loop.py:20)`. Chains start at a
    local variable of a running function, at a module's global variable or at a class; where there is none, at the type
    of the nearest object that is no plain container, in angle brackets. None if no such object refers to `thing`. Cost:
    one pass over all tracked objects for each link of the chain, tens of milliseconds each.
    """
    # Breadth first, from `thing` up through its referrers, until one has a name that a person can look up.
    running = _running_locals()
    seen = {id(thing), *map(id, ignore)}
    unrooted: str | None = None
    level, expressions = [thing], [""]
    for _ in range(_MAX_DEPTH):
        for holder, expression in zip(level, expressions, strict=True):
            if id(holder) in running:
                name, place = running[id(holder)]
                return _shorten(f"{name}{expression}, in {place}")
            if isinstance(holder, type):
                return _shorten(f"{holder.__module__}.{holder.__qualname__}{expression}")
            # A module's namespace has put its name into the expression already. A function is a name only if the chain
            # came through its closure; otherwise it is code like any other object.
            if _module_of(holder) or (isinstance(holder, FunctionType) and expression.startswith(_ARROW)):
                return _shorten(expression.removeprefix(_ARROW))
            if unrooted is None and holder is not thing and not isinstance(holder, _PLAIN):
                unrooted = f"<{type(holder).__name__}>{expression}"
        level, expressions = _one_level_up(level, expressions, seen)
        if not level:
            break
    return unrooted and _shorten(unrooted)


def _shorten(expression: str) -> str:
    """`model.cache` for `model.__dict__['cache']`."""
    return _DICT_LOOKUP.sub(r".\1", expression)


def _one_level_up(level: list[Any], expressions: list[str], seen: set[int]) -> tuple[list[Any], list[str]]:
    expression_of = {id(child): expression for child, expression in zip(level, expressions, strict=True)}
    # gc would report our own lists as holders.
    seen.add(id(level))
    holders: list[Any] = []
    longer: list[str] = []
    for parent in gc.get_referrers(*level):
        is_own = isinstance(parent, FrameType) and parent.f_code.co_filename in _OWN_FILES
        if is_own or id(parent) in seen or len(holders) == _MAX_BREADTH:
            continue
        child = next((child for child in gc.get_referents(parent) if id(child) in expression_of), None)
        seen.add(id(parent))
        holders.append(parent)
        longer.append(_longer(parent, child, expression_of.get(id(child), "")))
    seen.add(id(holders))
    return holders, longer


def _module_of(thing: object) -> str | None:
    name = thing.get("__name__") if type(thing) is dict else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and vars(module) is thing else None


def _longer(parent: Any, child: object, expression: str) -> str:
    if not isinstance(parent, FunctionType):
        return _link(parent, child) + expression
    closure, code = _CLOSURE.match(expression), parent.__code__
    if closure is None:  # a default value or an attribute
        return expression
    return f"{_ARROW}{code.co_freevars[int(closure[1])]}{expression[closure.end() :]} enclosed by {_place(code)}"


def _link(parent: Any, child: object) -> str:
    if isinstance(parent, dict):
        key = next((key for key, value in parent.items() if value is child), None)
        module = _module_of(parent)
        return f"{module}.{key}" if module else f"[{key!r}]" if isinstance(key, str | int) else "[…]"
    if isinstance(parent, TracebackType | CellType):
        return ""
    if isinstance(parent, list | tuple | deque):
        position = next((index for index, item in enumerate(parent) if item is child), "…")
        return f"{_CLOSURE_MARK if isinstance(child, CellType) else ''}[{position}]"
    if isinstance(parent, FrameType):
        return f"{_ARROW}{_local_name(parent, child)} of {_place(parent.f_code, parent.f_lineno)}"
    if isinstance(parent, GeneratorType) and parent.gi_frame is not None:
        return f"{_ARROW}{_local_name(parent.gi_frame, child)} of {_place(parent.gi_code)}"
    if isinstance(parent, type):
        return ".__dict__"
    return next((f".{name}" for name, value in _attributes(parent) if value is child), ".…")


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes stored in `thing` itself. Properties, which may run any code, are left alone."""
    if isinstance(thing, BaseException):
        yield from ((name, getattr(thing, name)) for name in ("__traceback__", "__cause__", "__context__", "args"))
    if type(thing).__dictoffset__:
        attributes = object.__getattribute__(thing, "__dict__")
        yield "__dict__", attributes
        yield from attributes.items()
    for kind in type(thing).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # a slot that was never set
                    yield name, member.__get__(thing)


def _local_name(frame: FrameType, child: object) -> str:
    return next((name for name, value in _locals(frame) if value is child), "a temporary")


def _locals(frame: FrameType) -> list[tuple[str, object]]:
    snapshot = frame.f_locals
    items = list(snapshot.items())
    if type(snapshot) is dict:
        snapshot.clear()  # Python 3.12 would keep it and its contents until the function ends
    return items


def _place(code: CodeType, line: int | None = None) -> str:
    return f"{code.co_qualname}() ({Path(code.co_filename).name}:{line or code.co_firstlineno})"


def _running_locals() -> dict[int, tuple[str, str]]:
    names: dict[int, tuple[str, str]] = {}
    # One of these frames is this function's own. A list that kept it would be a cycle, so it is emptied on the way.
    newest = list(sys._current_frames().values())
    while newest:
        frame: FrameType | None = newest.pop()
        while frame is not None:
            # Locals of a module are its globals.
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_code.co_filename not in _OWN_FILES:
                place = _place(frame.f_code, frame.f_lineno)
                for name, value in _locals(frame):
                    names.setdefault(id(value), (name, place))
            frame = frame.f_back
    return names
