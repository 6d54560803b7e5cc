"""Likely values of some results, where the real ones are unknown: guesses, which `known_values` then follows.

A router spreads tokens evenly over its experts, a mask hides nothing, no number happens to be that which is looked for,
and all are finite.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_memopt.planning.accounting.operation import named_arguments
from hf_memopt.planning.simulation import known_values

_aten = torch.ops.aten
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


def remember(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Attach likely values to a result without known ones."""
    packet = function.overloadpacket
    if packet in _EXCEPTIONAL and result.numel() <= _MAX_NUMBERS:
        with unset_fake_temporarily():
            value = torch.zeros(result.shape, dtype=torch.bool)
        known_values.attach(result, value, _FINITE)
    elif packet is _aten.topk or function is _aten.max.dim:
        _spread(args[0], named_arguments(function, args, kwargs).get("dim", -1), result[1])
    elif packet is _aten.argmax:
        _spread(args[0], named_arguments(function, args, kwargs).get("dim"), result)
    elif packet is _aten.eq:
        setattr(result, _IS_EQUALITY, True)
    elif packet is _aten.sum and args[0].dtype == torch.bool and known_values.value_of(result) is None:
        is_equality = getattr(args[0], _IS_EQUALITY, False)
        with unset_fake_temporarily():
            mask = torch.tensor(not is_equality).expand(args[0].shape)
            value = function(mask, *args[1:], **kwargs)
        known_values.attach(result, value, _UNEQUAL if is_equality else _FULL_MASK)


def even_counts(numbers: Tensor, num_bins: int) -> Tensor:
    """Return the result of bincount."""
    counts = numbers.new_empty(num_bins)
    with unset_fake_temporarily():
        value = torch.tensor(even_shares(numbers.numel(), num_bins))
    known_values.attach(counts, value, _EVEN_COUNTS)
    return counts


def even_shares(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _spread(scores: Tensor, dim: int | None, chosen: Tensor) -> None:
    """Attach choices that take turns, among the last dimension's scores."""
    if dim in (-1, scores.dim() - 1) and chosen.numel() <= _MAX_NUMBERS and known_values.value_of(chosen) is None:
        with unset_fake_temporarily():
            value = torch.arange(chosen.numel()).view(chosen.shape) % scores.shape[-1]
        known_values.attach(chosen, value, _EVEN_CHOICES)
