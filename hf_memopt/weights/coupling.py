"""Whether an optimizer's update of a parameter depends on that parameter alone, found out on small ones."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hf_memopt.autograd_state import COMES_AND_GOES, unwrapped
from hf_memopt.transfer.backends import backend_of
from hf_memopt.weights.optimizer_units import leaves
from hf_memopt.weights.residency.away import Classes

# Sizes of the gradients of two parameters in each update: coupling may show only where they differ much, or are large.
_SIZES = ((1.0, 1e3), (1e-3, 1.0), (1e2, 1e-2), (0.0, 1.0), (1.0, float("inf")))
_LENGTH = 4  # of each dimension
_RATE = 0.1  # a schedule may begin with 0, and few bits hide small updates


class UpdateVisits:
    """One update of an optimizer in several visits, each of which finds the options and attributes of the first one.

    An optimizer may count its updates there. A RuntimeError where visits leave different ones.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which schedulers look for
        self._optimizer = optimizer
        self._before = _settings(optimizer)
        self._after: Any = None
        self._is_loop = [_falls_back_to_loop(group) for group in optimizer.param_groups]
        named = (group for group in optimizer.param_groups if "param_names" in group)
        self._names = {
            id(each): name for group in named for each, name in zip(group["params"], group["param_names"], strict=True)
        }

    def update(self, number: int, parameters: list[Tensor]) -> None:
        """Update some parameters of a group by the optimizer's own `step`, without hooks; other groups have none."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        _restore(optimizer, self._before)
        whole = [{name: group[name] for name in _OF_PARAMETERS if name in group} for group in groups]
        for each, (group, is_loop) in enumerate(zip(groups, self._is_loop, strict=True)):
            group["params"] = parameters if each == number else []
            if "param_names" in group:
                group["param_names"] = [self._names[id(parameter)] for parameter in group["params"]]
            if is_loop:
                group["foreach"] = False
        try:
            bare_step(optimizer)
        finally:
            for group, held, is_loop in zip(groups, whole, self._is_loop, strict=True):
                group |= held
                if is_loop:
                    group["foreach"] = None
        after = _compared(optimizer)
        if self._after not in (None, after):
            raise RuntimeError(
                f"{type(optimizer).__name__} left other options after some of its parameters than after others: its "
                "update depends on more than a parameter and its state"
            )
        self._after = after

    def refuse_changes(self) -> None:
        """Raise RuntimeError if the options were changed since the last visit."""
        if self._after is not None and self._after != _compared(self._optimizer):
            raise RuntimeError(
                f"options of {type(self._optimizer).__name__} were changed after update_in_backward() had begun the "
                "update; change them before, or leave it out"
            )


def refuse_coupled(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether an optimizer writes gradients; a ValueError, with the evidence, if it couples parameters.

    Two small parameters of each group take five updates together and, in a second copy, one at a time, while the other
    one is NaN. Coupling that begins later is not seen. Costs some milliseconds.
    """
    are_written = False
    for group in groups:
        trained = [each for each in group["params"] if each.requires_grad and not nn.parameter.is_lazy(each)]
        if trained and backend_of(trained[0].device).has_values:
            try:
                are_written |= _refuse_coupled(optimizer, group, [trained[0], max(trained, key=Tensor.numel)])
            except Exception as error:
                name = type(optimizer).__name__
                raise ValueError(f"optimizer={name} {error}; keep its state on the device") from error
    return are_written


def _refuse_coupled(optimizer: Optimizer, group: dict[str, Any], like: Sequence[Tensor]) -> bool:
    together, both = _probe(optimizer, group, like)
    one_by_one, apart = _probe(optimizer, group, like)
    places = [each.data_ptr() for each in both]
    are_written = False
    with random_numbers_kept(both[0].device):
        for sizes in _SIZES:
            _set_gradients(both, sizes)
            given: list[Any] = [each.grad for each in both]
            before = [each.clone() for each in given]
            bare_step(together)
            are_written |= not all(map(_same, before, given))
    with random_numbers_kept(both[0].device):
        for sizes in _SIZES:
            _set_gradients(apart, sizes)
            _update_one_by_one(one_by_one, apart)
    for place, (one, other) in enumerate(zip(both, apart, strict=True)):
        values = [[found[0], *_tensors(found[1].state[found[0]])] for found in ((one, together), (other, one_by_one))]
        for mine, its in zip(*values, strict=True):
            if not _same(mine.detach(), its.detach()):
                difference = (mine.detach().float() - its.detach().float()).abs().nan_to_num(nan=0.0).max().item()
                raise ValueError(
                    "updates parameters by more than their own gradients and state: of two that took "
                    f"{len(_SIZES)} updates together and one at a time, number {place + 1} differs by {difference:.1e}"
                )
    states = [together.state[each] for each in both]
    if any(
        not isinstance(state, dict)
        or len(list(leaves(state))) != sum(isinstance(x, Tensor) for x in tree_leaves(state))
        for state in states
    ):
        raise ValueError("keeps state elsewhere than in dictionaries and lists")
    storages = [{each.untyped_storage()._cdata for each in _tensors(state) if each.dim()} for state in states]
    if storages[0] & storages[1]:
        raise ValueError("shares tensors of its state among parameters")
    if [each.data_ptr() for each in both] != places:
        raise ValueError("exchanges the memory of parameters")
    others = {name: value for name, value in vars(together).items() if name not in ("state", "param_groups")}
    if {each.untyped_storage()._cdata for each in _tensors(others)} & set.union(*storages):
        raise ValueError("keeps tensors of its state in attributes, too")
    untouched = both[1].detach().clone()
    both[0].grad, both[1].grad = torch.ones_like(both[0]), None
    try:
        with random_numbers_kept(both[0].device):
            bare_step(together)
    except Exception:  # it needs all gradients, as then in every step
        return are_written
    if both[1].grad is not None or not _same(untouched, both[1].detach()):
        raise ValueError("updates parameters that have no gradients")
    return are_written


def bare_copy(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> Optimizer:
    """Return an optimizer of the same class and attributes, with one group of other parameters, without state."""
    copied: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in (*REDIRECTED, "param_groups", "state") and "hooks" not in name:
            vars(copied)[name] = tree_map(_copied, value)
    options = {name: tree_map(_copied, value) for name, value in group.items() if name not in _OF_PARAMETERS}
    names = {"param_names": [str(number) for number in range(len(parameters))]} if "param_names" in group else {}
    copied.param_groups, copied.state = [{"params": parameters, **names, **options}], defaultdict(dict)
    return copied


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Leave the random numbers that follow as they were, and begin with the same ones each time."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed all devices
        if is_cuda:
            torch.cuda.default_generators[device.index].manual_seed(0)
        yield


def bare_step(optimizer: Optimizer) -> None:
    """Call the step of an optimizer's class, without hooks."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _probe(optimizer: Optimizer, group: dict[str, Any], like: Sequence[Tensor]) -> tuple[Optimizer, list[Tensor]]:
    small: list[Tensor] = []
    for each in like:
        values = torch.linspace(-1, 1, _LENGTH ** each.dim(), dtype=torch.float32, device=each.device)
        small.append(nn.Parameter(values.reshape((_LENGTH,) * each.dim()).to(each.dtype)))
    probe = bare_copy(optimizer, group, small)
    rate = probe.param_groups[0].get("lr")
    if rate is not None:
        probe.param_groups[0]["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
    for its, mine in zip(like, small, strict=True):
        if optimizer.state.get(its):  # some make it when they are made
            probe.state[mine] = _small_state(optimizer.state[its])
    return probe, small


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _small_state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.dim() == 0 else value.flatten()[0].repeat((_LENGTH,) * value.dim())
    return {name: _small_state(each) for name, each in value.items()} if isinstance(value, dict) else value


def _update_one_by_one(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    visits = UpdateVisits(optimizer)
    for parameter in parameters:
        hidden = [
            tensor
            for each in parameters
            for tensor in (each, each.grad, *(leaf.tensor for leaf in leaves(optimizer.state.get(each, {}))))
            if each is not parameter and tensor is not None and tensor.is_floating_point() and tensor.dim() > 0
        ]
        with torch.no_grad():
            kept = [tensor.clone() for tensor in hidden]
            for tensor in hidden:
                tensor.fill_(torch.nan)
        visits.update(0, [parameter])
        with torch.no_grad():
            for tensor, value in zip(hidden, kept, strict=True):
                tensor.copy_(value)


def _set_gradients(parameters: Sequence[Tensor], sizes: Sequence[float]) -> None:
    for number, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
        values = torch.linspace(-1, 0.5 + number, parameter.numel(), dtype=torch.float32, device=parameter.device)
        parameter.grad = (size * values).reshape(parameter.shape).to(parameter.dtype)


def _falls_back_to_loop(group: dict[str, Any]) -> bool:
    """Return whether the optimizer loops over a whole group where it would take some of its parameters at once."""
    if group.get("foreach", False) is not None or group.get("fused") is not None:
        return False
    parameters = [_as_in_a_visit(each) for each in group["params"] if each.grad is not None]
    return not _default_to_fused_or_foreach(parameters, group.get("differentiable", False))[1]


def _as_in_a_visit(parameter: Tensor) -> Tensor:
    """Return a parameter of the class and device that a parameter which comes and goes has in its visit."""
    if not hasattr(parameter, COMES_AND_GOES) or Classes.of(parameter).plain is not nn.Parameter:
        return parameter
    return nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False)


# Methods of an optimizer that another object may have taken over.
REDIRECTED = ("step", "state_dict", "load_state_dict", "add_param_group")
_OF_PARAMETERS = ("params", "param_names")


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers and texts in an optimizer's attributes, and the options of each group."""
    simple = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str | None)}
    options = ({name: group[name] for name in group if name not in _OF_PARAMETERS} for group in optimizer.param_groups)
    return [simple, *options]


def _compared(optimizer: Optimizer) -> Any:
    """Return the settings with a number for each tensor that changes when it is written."""
    return tree_map_only(Tensor, lambda each: (id(each), each._version), _settings(optimizer))


def _restore(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    now = _settings(optimizer)
    for holder, before, after in zip((vars(optimizer), *optimizer.param_groups), settings, now, strict=True):
        for name in after.keys() - before.keys():
            del holder[name]
        holder.update(before)


def _tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors in dictionaries and lists."""
    return [each for leaf in leaves(value) for each in unwrapped(leaf.tensor)]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point() or one.is_complex():
        one, other = (torch.nan_to_num(each, nan=1.5, posinf=2.5, neginf=-2.5) for each in (one, other))
    return torch.equal(one, other)
