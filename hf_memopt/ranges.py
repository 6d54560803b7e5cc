"""Ranges of numeric options: one form of complaint for the library, the commands and the recipes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Range:
    """The finite numbers that an option takes, `at_least` and `at_most` included, `above` and `below` not.

    With `whole` only whole numbers; `why` ends the complaint: a reason or a remedy.
    """

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    whole: bool = False
    why: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for a value outside; None stands for an option that is off."""
        if value is not None and (complaint := self.complaint(value)):
            raise ValueError(f"{name}={value!r} {complaint}")

    def complaint(self, value: Any) -> str | None:
        if not _is_number(value, self.whole):
            return f"must be a {'whole' if self.whole else 'finite'} number{self.why}"
        bounds = {
            f"at least {self.at_least}": value >= self.at_least,
            f"above {self.above}": value > self.above,
            f"at most {self.at_most}": value <= self.at_most,
            f"less than {self.below}": value < self.below,
        }
        violated = next((bound for bound, holds in bounds.items() if not holds), None)
        return violated and f"must be {violated}{self.why}"


def check_ranges(group: Any, names: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for numbers outside of the ranges in a dataclass's types, such as `Annotated[int, COUNT]`."""
    for name, hint in get_type_hints(type(group), include_extras=True).items():
        for allowed in ranges_in(hint):
            value = getattr(group, name)
            for each in value if isinstance(value, list) else [value]:
                allowed.check(name if names is None else names[name], each)


def ranges_in(hint: Any) -> Iterator[Range]:
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range))
    for part in get_args(hint):
        yield from ranges_in(part)


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, Integral) or (not whole and isinstance(value, Real) and math.isfinite(value))


COUNT = Range(at_least=1, at_most=2**31 - 1, whole=True)
COUNT_OR_ZERO = Range(at_least=0, whole=True)
NOT_NEGATIVE = Range(at_least=0)
POSITIVE = Range(above=0)
SHARE = Range(at_least=0, below=1)
SEED = Range(at_least=0, at_most=2**32 - 1, whole=True)
