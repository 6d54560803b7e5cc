"""Modules whose saved tensors stay on the device, as `ActivationOffloader(skip=...)` names them."""

import fnmatch
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

# Module objects, their classes, and patterns of their names or of the names of their classes.
Skip = Sequence[nn.Module | type[nn.Module] | str]
_Entry = nn.Module | type[nn.Module] | re.Pattern[str]

# Every call of a module runs this, also of one that is compiled in place.
_CALL = nn.Module._wrapped_call_impl.__code__
# Parts that wrappers put into the names of the modules inside.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class SkippedModules:
    """The modules that a user's `skip` means, and all modules inside of them; a ValueError where it is no sequence."""

    def __init__(self, given: Skip) -> None:
        if isinstance(given, str | nn.Module) or not isinstance(given, Sequence):
            raise ValueError(
                f"skip={given!r} must be a sequence of modules, classes and name patterns, as skip=('lm_head',)"
            )
        self._entries = [_entry(each) for each in given]
        self._given = tuple(given)
        self._unmatched = set(range(len(self._entries)))
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._by_class: dict[type, bool] = {}

    def among(self, model: nn.Module | None) -> Callable[[FrameType | None], bool] | None:
        """Return a predicate: does a frame run inside a call of a skipped module? None if nothing is skipped.

        Without a model patterns mean classes alone. It costs some us per 100 frames.
        Entries that have matched no module by a model's second pass are named in a warning, once.
        """
        if not self._entries:
            return None
        skipped: set[int] = set()
        for name, module in () if model is None else model.named_modules():
            matched = [index for index, entry in enumerate(self._entries) if _is_meant(entry, name, module)]
            if matched:
                self._unmatched.difference_update(matched)
                skipped.update(map(id, module.modules()))
        if model is not None:
            self._warn_of_unmatched(model)
        skipped.update(id(entry) for entry in self._entries if isinstance(entry, nn.Module))
        return lambda frame: any(
            id(module) in skipped or self._has_class(type(module)) for module in _modules_called(frame)
        )

    def _has_class(self, kind: type[nn.Module]) -> bool:
        if kind not in self._by_class:
            self._by_class[kind] = any(_means_class(entry, kind) for entry in self._entries)
        return self._by_class[kind]

    def _warn_of_unmatched(self, model: nn.Module) -> None:
        if model in self._seen and self._unmatched:
            unmatched = ", ".join(_as_given(self._given[index]) for index in sorted(self._unmatched))
            self._unmatched.clear()
            logger.warning(
                "activation offloading: skip: %s is no module, class or name in %s; its named_modules() show the names",
                unmatched,
                type(model).__name__,
            )
        self._seen.add(model)


def _modules_called(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules at work, innermost first, compiled ones as the module that was compiled."""
    while frame is not None:
        if frame.f_code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            yield getattr(module, "_orig_mod", module)
        frame = frame.f_back


def _entry(given: Any) -> _Entry:
    """Return a module or a class as given, and a pattern as the expression of names and of their ends after a dot."""
    if isinstance(given, str) and given:
        return re.compile(rf"(?:.*\.)?{fnmatch.translate(given)}")
    if isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module)):
        return given
    raise ValueError(f"skip has {given!r}, which is no module, no class of modules and no name pattern")


def _is_meant(entry: _Entry, name: str, module: nn.Module) -> bool:
    if entry is module or _means_class(entry, type(module)):
        return True
    inner = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return isinstance(entry, re.Pattern) and any(map(entry.fullmatch, (name, inner)))


def _means_class(entry: _Entry, kind: type[nn.Module]) -> bool:
    """Return whether an entry is the class, or the pattern of one, that `kind` is or derives from."""
    if isinstance(entry, type):
        return issubclass(kind, entry)
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    return isinstance(entry, re.Pattern) and any(entry.fullmatch(base.__name__) for base in bases)


def _as_given(each: Any) -> str:
    return repr(each) if isinstance(each, str) else getattr(each, "__name__", type(each).__name__)
