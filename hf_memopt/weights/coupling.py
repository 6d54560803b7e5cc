"""Whether an optimizer's update of a parameter depends on that parameter alone, found out on small ones."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from hf_memopt.weights.optimizer_units import leaves

# Sizes of the gradients of two parameters in each update: coupling may show only where they differ much, or are large.
_SIZES = ((1.0, 1e3), (1e-3, 1.0), (1e2, 1e-2), (0.0, 1.0))
_LENGTH = 4  # of each dimension


class GroupVisits:
    """Updates of one group in several visits, each of which finds the options that the first one found.

    An optimizer may count its updates there. A RuntimeError where visits leave different options.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer, self._group = optimizer, group
        self._before = _options(group)
        self._after: dict[str, Any] | None = None
        self._is_plain_loop = _falls_back_to_loop(group)

    def update(self, parameters: list[Tensor]) -> None:
        """Update some of the group's parameters by the optimizer's own `step`."""
        group, optimizer = self._group, self._optimizer
        whole, groups = group["params"], optimizer.param_groups
        for name in _options(group).keys() - self._before.keys():
            del group[name]
        group |= self._before
        if self._is_plain_loop:
            group["foreach"] = False
        group["params"], optimizer.param_groups = parameters, [group]
        try:
            optimizer.step()
        finally:
            group["params"], optimizer.param_groups = whole, groups
            if self._is_plain_loop:
                group["foreach"] = None
        after = _options(group)
        if self._after not in (None, after):
            raise RuntimeError(
                f"{type(optimizer).__name__} left other options of a group after some of its parameters than after "
                "others: its update depends on more than a parameter and its state"
            )
        self._after = after


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run an optimizer's steps without their hooks, and without those of all optimizers."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for_all: tuple[Any, Any] = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    of_all = [(hooks, dict(hooks)) for hooks in for_all]
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for hooks, _ in of_all:
        hooks.clear()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        for hooks, held in of_all:
            hooks.update(held)


def refuse_coupled(optimizer: Optimizer) -> None:
    """Raise ValueError, with the evidence, for an optimizer that cannot update a parameter by itself.

    Two small parameters of each group take four updates together and, in a second copy, one at a time, while the other
    one is NaN. Costs some milliseconds.
    """
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        like = [group["params"][0], max(group["params"], key=Tensor.numel)]
        both = [_small(each) for each in like]
        apart = [each.detach().clone().requires_grad_() for each in both]
        together = bare_copy(optimizer, [{**_options(group), "params": both}])
        one_by_one = bare_copy(optimizer, [{**_options(group), "params": apart}])
        for each, one, other in zip(like, both, apart, strict=True):
            for probe, small in ((together, one), (one_by_one, other)):
                if optimizer.state.get(each):  # some make it when they are made
                    probe.state[small] = _small_state(optimizer.state[each], small)
        with random_numbers_kept(both[0].device), without_hooks(together):
            try:
                for sizes in _SIZES:
                    _set_gradients(both, sizes)
                    together.step()
            except Exception as error:
                raise ValueError(
                    f"optimizer={name} cannot update two small parameters of group {number}, by which it is probed: "
                    f"{error}; keep its state on the device"
                ) from error
        with random_numbers_kept(both[0].device), without_hooks(one_by_one):
            for sizes in _SIZES:
                _set_gradients(apart, sizes)
                try:
                    _update_one_by_one(one_by_one, apart)
                except RuntimeError as error:
                    raise ValueError(f"optimizer={name}: {error}; keep its state on the device") from error
        for place, (one, other) in enumerate(zip(both, apart, strict=True)):
            if not _same(one.detach(), other.detach()):
                difference = (one.detach() - other.detach()).abs().max().item()
                raise ValueError(
                    f"optimizer={name} updates parameters by more than their own gradients and state: of two that "
                    f"took {len(_SIZES)} updates together and one at a time, number {place + 1} of group {number} "
                    f"differs by {difference:.1e}; keep its state on the device"
                )


def bare_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and attributes, with other groups, without state and hooks."""
    copied: Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    copied.__dict__.pop("step", None)  # replaced by schedulers, and bound to the original
    copied.param_groups, copied.state = groups, defaultdict(dict)
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return copied


def _update_one_by_one(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    visits = GroupVisits(optimizer, optimizer.param_groups[0])
    for parameter in parameters:
        others = [each for each in parameters if each is not parameter]
        hidden = [
            tensor
            for each in others
            for tensor in (each, each.grad, *(leaf.tensor for leaf in leaves(optimizer.state.get(each, {}))))
            if tensor is not None and tensor.is_floating_point() and tensor.dim() > 0
        ]
        with torch.no_grad():
            kept = [tensor.clone() for tensor in hidden]
            for tensor in hidden:
                tensor.fill_(torch.nan)
        visits.update([parameter])
        with torch.no_grad():
            for tensor, value in zip(hidden, kept, strict=True):
                tensor.copy_(value)


def _small(like: Tensor) -> Tensor:
    shape = (_LENGTH,) * like.dim()
    values = torch.linspace(-1, 1, _LENGTH ** like.dim(), dtype=torch.float32, device=like.device)
    return nn.Parameter(values.reshape(shape).to(like.dtype))


def _small_state(value: Any, small: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.dim() == 0 else value.flatten()[0].repeat((_LENGTH,) * value.dim())
    return {name: _small_state(each, small) for name, each in value.items()} if isinstance(value, dict) else value


def _set_gradients(parameters: Sequence[Tensor], sizes: Sequence[float]) -> None:
    for number, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
        values = torch.linspace(-1, 0.5 + number, parameter.numel(), dtype=torch.float32, device=parameter.device)
        parameter.grad = (size * values).reshape(parameter.shape).to(parameter.dtype)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Leave the random numbers that follow as they were, and begin with the same ones each time."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _falls_back_to_loop(group: dict[str, Any]) -> bool:
    """Return whether the optimizer loops over a whole group where it would take some of its parameters at once."""
    if group.get("foreach", False) is not None or group.get("fused") is not None:
        return False
    parameters = [each for each in group["params"] if each.grad is not None]
    return not _default_to_fused_or_foreach(parameters, group.get("differentiable", False))[1]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=1.5), other.nan_to_num(nan=1.5))
