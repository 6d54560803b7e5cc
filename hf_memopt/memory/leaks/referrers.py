"""References to an object, as a Python expression."""

import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, TracebackType
from typing import Any

_MAX_DEPTH = 32
_MAX_BREADTH = 200  # objects followed at each level
_ARROW = " → "
_CLOSURE_MARK = ".__closure__"
_DICT_LOOKUP = re.compile(r"\.__dict__\['(\w+)'\]")
_CLOSURE = re.compile(r"\.__closure__\[(\d+)\]")
_PLAIN = (dict, list, tuple, deque, set, CellType, FrameType, TracebackType)
_OWN_FILES = {str(path) for path in Path(__file__).parent.glob("*.py")}


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
