"""Random programs for streamed weights: the parts of a model, and steps that train it. Each prints as text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from streamed_parts import AFTER, FORMS, HOOKS, KINDS, MEMORY


@dataclass(frozen=True)
class Part:
    """A module of a kind, and all that is unusual about it."""

    kind: str = "x @ w"
    frozen: str = "all"
    reads: str = "call"
    form: str = ""
    after: str = ""
    hook: str = ""
    memory: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class Step:
    """A step; `before` it, and in `fails`, something happens to part `at`, modulo their number."""

    grads: str = "train"
    backward: str = "after"
    path: str = ""
    autocast: str = ""
    before: str = ""
    fails: str = ""
    thread: str = ""
    at: int = 0


@dataclass(frozen=True)
class Program:
    parts: tuple[Part, ...]
    steps: tuple[Step, ...]
    home: str = "host"
    budget: str = ""
    copier: str = ""
    seed: int = 0

    def __str__(self) -> str:
        lines = [f"  part {number}: {_text(part)}" for number, part in enumerate(self.parts)]
        lines += [f"  step {number}: {_text(step)}" for number, step in enumerate(self.steps)]
        return "\n".join([f"seed {self.seed}: {_text(replace(self, parts=(), steps=(), seed=0))}", *lines])

    def features(self) -> frozenset[str]:
        """Return what is not as by default, such as "form object"."""
        each = (self, *self.parts, *self.steps)
        return frozenset(f"{name} {value}" for one in each for name, value in _unusual(one) if name in OPTIONS)

    @property
    def is_refusable(self) -> bool:
        return not REFUSABLE.isdisjoint(self.features())


OPTIONS: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "frozen": ("all", "all", "weights", "biases", "none"),
    "reads": ("forward", "forward from step 2", "by turns", "also in the loss", "never", "forward in visit"),
    "form": tuple(FORMS),
    "after": tuple(AFTER),
    "hook": HOOKS,
    "memory": tuple(MEMORY),
    "checkpoint": ("reentrant", "not reentrant"),
    "grads": ("train", "eval", "no_grad"),
    "backward": ("inside", "twice", "with the next", "double", "grad", "never"),
    "path": ("a", "b"),
    "autocast": ("bfloat16",),
    "before": ("unfreeze", "freeze", "clone", "copy", "write", "state_dict", "call", "forward outside of stream"),
    "fails": ("forward", "backward", "forward by Ctrl-C", "backward by Ctrl-C"),
    "thread": ("evaluates",),
    "home": ("file",),
    "budget": ("0.02", "0.5", "1"),
    "copier": ("early", "late", "random"),
}  # fmt: skip
# Changes of frozen weights, reads outside of a pass, a view that outlives its pass, and torch's own attention, where
# its `forward` is called.
REFUSABLE = frozenset(
    (
        *(f"before {each}" for each in ("unfreeze", "write", "clone", "copy")),
        "kind x @ turned, kept from the first call",
        "kind attention",
    )
)
# Of a setting to be unusual. Files take the most time.
_CHANCE = 0.12
_CHANCES = {"kind": 1, "frozen": 1, "home": 0.2, "thread": 0.06, "fails": 0.06}
_CHANCES |= dict.fromkeys(("grads", "budget", "after", "backward"), 0.3)


def draw(seed: int, without: Iterable[str] = ()) -> Program:
    """Draw the program of a seed, without features such as "form object", or "form" for all of these."""
    random, without = Random(seed), frozenset(without)

    def drawn(kind: Any, **given: Any) -> Any:
        values = {}
        for field in fields(kind):
            allowed = [each for each in OPTIONS.get(field.name, ()) if f"{field.name} {each}" not in without]
            if allowed and field.name not in without and random.random() < _CHANCES.get(field.name, _CHANCE):
                values[field.name] = random.choice(allowed)
        return kind(**values | given)

    parts = tuple(drawn(Part) for _ in range(random.choice((1, 2, 2, 3, 4))))
    steps = tuple(drawn(Step, at=random.randrange(len(parts))) for _ in range(3))
    program: Program = drawn(Program, parts=parts, steps=steps, seed=seed)
    return program if program.home == "host" else replace(program, copier="")


def smaller(program: Program) -> Iterator[Program]:
    """Yield the programs that lack a part, a step or something unusual."""
    for name in ("parts", "steps"):
        several = getattr(program, name)
        for number, one in enumerate(several):
            before, after = several[:number], several[number + 1 :]
            if before or after:
                yield replace(program, **{name: (*before, *after)})
            for field, _ in _unusual(one):
                yield replace(program, **{name: (*before, replace(one, **{field: _default(one, field)}), *after)})
    for field, _ in _unusual(program):
        if field in OPTIONS:
            yield replace(program, **{field: _default(program, field)})


def _default(each: Any, name: str) -> Any:
    return type(each).__dataclass_fields__[name].default


def _unusual(each: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(each):
        value = getattr(each, field.name)
        if value != field.default:
            yield field.name, value


def _text(each: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in _unusual(each) if value != ()) or "as by default"
