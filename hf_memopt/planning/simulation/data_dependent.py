"""Answers to questions that only real numbers could answer, and a record of every guess.

Where a program asks for a value (`.item()`, `if tensor:`, `nonzero`), it gets the answer that a plain training run
would most likely give, which is noted; values that follow from constants of the program, or from a likely guess, are
known (`known_values`).
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from hf_memopt.planning.accounting.allocation_log import StepPhases
from hf_memopt.planning.accounting.operation import named_arguments
from hf_memopt.planning.simulation import known_values
from hf_memopt.planning.simulation.known_values import guess_of, value_of

_aten = torch.ops.aten
# Single random numbers on the host, which decide, say, on dropping a layer, are really drawn.
_DRAWN = (_aten.rand.default, _aten.randint.default, _aten.randint.low)
# With a reduction, kernels allocate each element's loss, and shrink it in place: its memory stays.
_SHRUNK = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.binary_cross_entropy.default,
    _aten.soft_margin_loss.default,
)
_SPLITS = (_aten.split_with_sizes, _aten.unsafe_split_with_sizes, _aten.split_with_sizes_copy)
_WITHOUT_FAKE = (UnsupportedOperatorException, NotImplementedError)
_NUMBER = "a whole number read from a tensor taken as 1"
_EVEN_PARTS = "a split by numbers read from a tensor taken to be even, so that experts get equal shares of the tokens"
# Checks pass: masks are full, the arguments of distributions are valid.
_TAKEN_AS_TRUE = ("all", "_is_all_true")


class UnsupportedOperationError(ValueError):
    """An operation that cannot be simulated."""


class DataDependentOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about values that fake tensors cannot; `guesses` counts assumptions, which may change memory.

    A known value is given. Otherwise a number is 1, and a truth value False, except from `all` and its like: masks hide
    nothing, and no exceptional branch is taken. Selections (`nonzero`, boolean indexing) take all of their input.
    """

    def __init__(self, phases: StepPhases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guesses: Counter[str] = Counter()
        self._phases = phases
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _aten._grouped_mm.default:
            return _grouped_mm(function, args, kwargs)
        if function.overloadpacket is _aten._ctc_loss_backward:
            return torch.empty_like(args[1])  # the gradient of the logarithms of probabilities
        if function in _DRAWN and _is_one_number_on_host(function, args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function.overloadpacket in _SPLITS and self._has_guessed_numbers:
            args = self._adding_up(*args)
        try:
            result = function(*args, **kwargs)
            if function in _SHRUNK:
                result = _shrunk(result, *args[:2])
        except DataDependentOutputException:
            answer = known_values.computed(function, args, kwargs)
            if answer is None:
                return self._value(function, args)
            self._note(guess_of(*args))
            return answer
        except DynamicOutputShapeException:
            return self._selection(function, args, kwargs)
        except Exception as error:  # an operation's fake implementation may raise any type
            # Custom operators of torch.library have a fake implementation that says that there is none.
            if isinstance(error, _WITHOUT_FAKE) or "no fake impl registered" in str(error):
                raise UnsupportedOperationError(
                    f"{self._place(function)}: torch has no fake implementation of this operation for these arguments "
                    f"({error}), so its memory cannot be simulated; register one with torch.library.register_fake, or "
                    "leave the operation out of the simulated step"
                ) from error
            if self._has_guessed_numbers:
                first_line = str(error).strip().partition("\n")[0]
                raise UnsupportedOperationError(
                    f"{self._place(function)}: its arguments do not fit ({first_line}), since whole numbers "
                    "read from tensors are unknown in a simulation and taken as 1; compute sizes from shapes, or leave "
                    "the operation out of the simulated step"
                ) from error
            raise
        if isinstance(result, Tensor) and result.dtype == torch.bool and result.numel() == 1:
            self._sources[result] = function.overloadpacket.__name__
        known_values.remember(function, args, kwargs, result)
        return result

    @property
    def _has_guessed_numbers(self) -> bool:
        return _NUMBER in self.guesses

    def _place(self, function: Any) -> str:
        return f"{function}, in module {self._phases.module!r}"

    def _note(self, guess: str | None) -> None:
        if guess is not None:
            self.guesses[guess] += 1

    def _adding_up(self, tensor: Tensor, sizes: list[int], dim: int = 0) -> tuple[Tensor, list[int], int]:
        """Return the arguments of a split, with even sizes where numbers that were read do not add up."""
        if sizes and sum(sizes) != tensor.shape[dim]:
            self._note(_EVEN_PARTS)
            sizes = known_values.even_shares(tensor.shape[dim], len(sizes))
        return tensor, sizes, dim

    def _value(self, function: Any, args: Any) -> Any:
        if function in (_aten.equal.default, _aten.allclose.default):
            self._note(f"two tensors that the program compares ({function.overloadpacket.__name__}) taken to be equal")
            return True
        tensor = args[0]
        if tensor.dtype != torch.bool and tensor.is_floating_point():
            return 1.0
        if tensor.dtype != torch.bool:
            self._note(_NUMBER)
            return 1
        source = self._sources.get(tensor, "bool")  # type: ignore[no-untyped-call]
        holds = source in _TAKEN_AS_TRUE
        self._note(f"a condition on a tensor's values ({source}) taken {'to hold' if holds else 'not to hold'}")
        return holds

    def _selection(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        known = known_values.computed(function, args, kwargs)
        if known is not None:
            guess = guess_of(*args)
            self._note(guess)
            result = tree_map(lambda value: tensor.new_empty(value.shape, dtype=value.dtype), known)
            known_values.attach(result, known, guess)
            return result
        if function is _aten.index.Tensor:
            return self._index(*args)
        if function is _aten.nonzero.default:
            return self._positions(tensor)
        if function is _aten.masked_select.default:
            return tensor.new_empty((self._count("masked_select", torch.broadcast_tensors(*args)[1]),))  # type: ignore[no-untyped-call]
        if function is _aten._unique2.default:
            count = self._count("_unique2", tensor)
            inverse = tensor.new_empty(tensor.shape, dtype=torch.int64)
            return tensor.new_empty((count,)), inverse, tensor.new_empty((count,), dtype=torch.int64)
        if function in (_aten._ctc_loss.default, _aten._ctc_loss.Tensor):
            return self._ctc_loss(*args)
        if function is _aten.repeat_interleave.Tensor:
            self._note("repeat_interleave taken to repeat each element once")
            return torch.empty_like(tensor)
        if function is _aten.bincount.default and len(args) > 2 and args[2] > 0:
            return known_values.even_counts(tensor, args[2])
        raise UnsupportedOperationError(
            f"{self._place(function)}: the size of its result depends on values and cannot be guessed; compute it from "
            "shapes, or leave the operation out of the simulated step"
        )

    def _positions(self, mask: Tensor) -> Tensor:
        return mask.new_empty((self._count("nonzero", mask), mask.dim()), dtype=torch.int64)

    def _count(self, name: str, mask: Tensor) -> int:
        value = value_of(mask)
        if value is not None:
            self._note(guess_of(mask))
            with unset_fake_temporarily():
                return known_values.num_true(value)
        self._note(f"{name} taken to select 100% of its input")
        return max(1, mask.numel())

    def _index(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        """Turn masks into the indices of the elements that they select, as torch's kernels do."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                positions += self._positions(index).unbind(1)
            else:
                positions.append(index)
        result: Tensor = _aten.index.Tensor(tensor, positions)
        return result

    def _ctc_loss(self, log_probs: Tensor, targets: Tensor, *lengths: Any) -> tuple[Tensor, Tensor]:
        """Losses `(batch,)` and forward variables `(batch, time, 2 * target + 1)`, for targets of full length."""
        num_steps, batch, _ = log_probs.shape
        longest = targets.shape[-1] if targets.dim() == 2 else targets.numel() // batch
        self._note("ctc_loss taken to have targets of full length")
        return log_probs.new_empty(batch), log_probs.new_empty(batch, num_steps, 2 * longest + 1)


def _grouped_mm(function: Any, args: Any, kwargs: Any) -> Tensor:
    """torch's fake implementation takes bfloat16 alone, unlike its kernels."""
    standing_in = [each.to(torch.bfloat16) for each in args[:2]]
    result: Tensor = function(*standing_in, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def _shrunk(result: Tensor, input: Tensor, target: Tensor) -> Tensor:
    elements = torch.broadcast_shapes(input.shape, target.shape)  # type: ignore[no-untyped-call]
    return result if result.shape == elements else result.new_empty(elements).as_strided((), ())


def _is_one_number_on_host(function: Any, args: Any, kwargs: Any) -> bool:
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    size: tuple[int, ...] = named_arguments(function, args, kwargs).get("size", ())
    return math.prod(size) <= 1
