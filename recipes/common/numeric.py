"""Types of flags that are numbers within a range, which `flags` checks."""

from typing import Annotated

from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range

Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_ZERO]
Seed = Annotated[int, SEED]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]
TwoOrMore = Annotated[int, Range(at_least=2, whole=True)]
HeldOut = Annotated[float, Range(above=0, below=1, why=", for example 0.02")]
