"""Whole numbers and truth values that are known in a simulation or likely, and values that follow from them.

Fake tensors have no values, but a model that counts its image tokens, or cuts patches into windows, asks for some.
Those that the program wrote down (`torch.tensor([[1, 2]])`) or made on the host (`torch.ones(9)`) are known, and all
ranges; each operation on nothing but known values is also done with these, so that the answers are those of a real run.

Likely values are guesses: a router spreads tokens evenly over its experts, a mask hides nothing, no number happens to
be that which is looked for, and all are finite.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from hf_memopt.planning.accounting.operation import named_arguments, tensors_in
from hf_memopt.units import MIB

_aten = torch.ops.aten
# But for ranges, those on a device stand for data: a batch of zeros is none of padding.
_FACTORIES = {_aten.full, _aten.ones, _aten.zeros, _aten.scalar_tensor}
# Attributes of fake tensors.
_VALUE = "_hf_memopt_value"
_GUESS = "_hf_memopt_guess"
# No program asks for the values of masks of all pairs of tokens, but some do for those of each token and each expert.
_MAX_BYTES = 64 * MIB
_MAX_GUESSED_BYTES = 512 * MIB
_EVEN_CHOICES = (
    "choices by topk, max or argmax taken to be spread evenly, so that experts get equal shares of the tokens"
)
_EVEN_COUNTS = "numbers counted by bincount taken to be spread evenly"
_FULL_MASK = "a mask whose elements are counted taken to hide nothing"
_UNEQUAL = "no number taken to be one that is looked for, where those are counted"
_FINITE = "all numbers taken to be finite"
_EXCEPTIONAL = (_aten.isnan, _aten.isinf)
# An attribute of fake tensors.
_IS_EQUALITY = "_hf_memopt_is_equality"
# More than routers choose.
_MAX_NUMBERS = 2**24


def value_of(tensor: Any) -> Tensor | None:
    """Return the values of a tensor, on the CPU, if they are known."""
    value: Tensor | None = getattr(tensor, _VALUE, None)
    is_forgotten = value is not None and value.numel() > 0 and value.untyped_storage().nbytes() == 0
    return None if is_forgotten else value


def guess_of(*args: Any) -> str | None:
    """Return the guess that known values rest on; None, they rest on none."""
    guesses = (getattr(each, _GUESS, None) for each in tensors_in(args))
    return next(filter(None, guesses), None)


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on known values; None, one of them is unknown, or the CPU cannot do it."""
    if not _follows(function, args, kwargs):
        return None
    with unset_fake_temporarily():
        known_args, known_kwargs = tree_map(_as_known, (args, kwargs))
        try:
            return function(*known_args, **known_kwargs)
        except NotImplementedError:  # histc of whole numbers, for example, has kernels for other devices alone
            return None


def remember(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Attach known values to the results of an operation, or likely ones."""
    _follow(function, args, kwargs, result)
    _guess(function, args, kwargs, result)


def _follow(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Attach their values to the results of an operation, if they follow from known values.

    A tensor that an operation writes unknown values to is unknown from then on, and so are all views of it.
    """
    if function.overloadpacket is _aten.set_:
        setattr(args[0], _VALUE, None)  # those of another storage
    elif _is_mutable(function) and not _follows(function, args, kwargs):
        for tensor in _written(function, args):
            _forget(tensor)
        return
    guess = guess_of(*args, *kwargs.values())
    if _fits(function, result, _MAX_BYTES if guess is None else _MAX_GUESSED_BYTES):
        attach(result, computed(function, args, kwargs), guess)


def attach(result: Any, value: Any, guess: str | None = None) -> None:
    if isinstance(value, Tensor) and isinstance(result, FakeTensor) and _is_whole(value):
        setattr(result, _VALUE, value)
        setattr(result, _GUESS, guess)
    elif isinstance(value, tuple | list):
        for each, its_value in zip(result, value, strict=True):
            attach(each, its_value, guess)


def num_true(value: Tensor) -> int:
    """Return how many elements hold, without looking twice at those that an expanded tensor repeats."""
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
    repeats = math.prod(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride == 0)
    return int(once.count_nonzero()) * repeats


def _follows(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the values of all arguments are known, and nothing else decides on the result."""
    tensors = tensors_in((args, kwargs))
    if not tensors:
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return function.overloadpacket is _aten.arange or (on_host and function.overloadpacket in _FACTORIES)
    is_known = all(_is_real(each) or value_of(each) is not None for each in tensors)
    return is_known and torch.Tag.nondeterministic_seeded not in function.tags


@cache
def _is_mutable(function: Any) -> bool:
    return bool(function._schema.is_mutable)


@cache
def _is_view(function: Any) -> bool:
    return any(argument.alias_info is not None for argument in function._schema.returns)


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor was just made of Python's numbers."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _as_known(each: Any) -> Any:
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return value_of(each) if isinstance(each, FakeTensor) else each


def _fits(function: Any, result: Any, max_bytes: int) -> bool:
    tensors = tensors_in(result)
    if not any(map(_is_whole, tensors)):
        return False
    return _is_view(function) or sum(each.numel() * each.element_size() for each in tensors) <= max_bytes


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _written(function: Any, args: Any) -> Iterator[Tensor]:
    for argument, each in zip(function._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(each)


def _forget(tensor: Tensor) -> None:
    """Empty the memory of a tensor's values, which its views share."""
    value = getattr(tensor, _VALUE, None)
    if value is not None:
        with unset_fake_temporarily():
            value.untyped_storage().resize_(0)


def _guess(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Attach likely values to a result without known ones."""
    packet = function.overloadpacket
    if packet in _EXCEPTIONAL and result.numel() <= _MAX_NUMBERS:
        with unset_fake_temporarily():
            value = torch.zeros(result.shape, dtype=torch.bool)
        attach(result, value, _FINITE)
    elif packet is _aten.topk or function is _aten.max.dim:
        _spread(args[0], named_arguments(function, args, kwargs).get("dim", -1), result[1])
    elif packet is _aten.argmax:
        _spread(args[0], named_arguments(function, args, kwargs).get("dim"), result)
    elif packet is _aten.eq:
        setattr(result, _IS_EQUALITY, True)
    elif packet is _aten.sum and args[0].dtype == torch.bool and value_of(result) is None:
        is_equality = getattr(args[0], _IS_EQUALITY, False)
        with unset_fake_temporarily():
            mask = torch.tensor(not is_equality).expand(args[0].shape)
            value = function(mask, *args[1:], **kwargs)
        attach(result, value, _UNEQUAL if is_equality else _FULL_MASK)


def even_counts(numbers: Tensor, num_bins: int) -> Tensor:
    """Return the result of bincount."""
    counts = numbers.new_empty(num_bins)
    with unset_fake_temporarily():
        value = torch.tensor(even_shares(numbers.numel(), num_bins))
    attach(counts, value, _EVEN_COUNTS)
    return counts


def even_shares(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _spread(scores: Tensor, dim: int | None, chosen: Tensor) -> None:
    """Attach choices that take turns, among the last dimension's scores."""
    if dim in (-1, scores.dim() - 1) and chosen.numel() <= _MAX_NUMBERS and value_of(chosen) is None:
        with unset_fake_temporarily():
            value = torch.arange(chosen.numel()).view(chosen.shape) % scores.shape[-1]
        attach(chosen, value, _EVEN_CHOICES)
