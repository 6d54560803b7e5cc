"""Guards of streamed parameters: nobody saves, copies, loads or merges the placeholders between visits."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_memopt.autograd_state import COMES_AND_GOES
from hf_memopt.weights.quantised import is_quantised, rewrapped

_REMEDY = "call remove() of its StreamedWeights first"


class StreamedParameter(NamedTuple):
    """A streamed parameter, its full name, and the module that has it under its last name."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter


class ParameterGuards:
    """Guards the parameters as long as they stream.

    A state dict gets their values at home, read only. Loading, merging, copying and pickling them raise a RuntimeError
    that names the weight. `check` finds those that were replaced, unfrozen, cast or moved.

    Args:
        at_home: by the id of a plain tensor, the same tensor at its home.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[StreamedParameter], at_home: Mapping[int, Tensor]
    ) -> None:
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._layers = [(name, module) for name, module in model.named_modules() if _merges(module)]
        values = {id(each.parameter): _value_at_home(each.parameter, at_home) for each in parameters}
        owners: dict[Any, dict[str, Tensor]] = {}
        for each in parameters:
            owners.setdefault(each.owner, {})[each.attribute] = values[id(each.parameter)]
            for method in _COPIES:
                setattr(each.parameter, method, partial(_refuse, f"frozen weight {each.name!r} cannot be copied"))
            setattr(each.parameter, COMES_AND_GOES, True)
        for owner, found in owners.items():
            self._handles.append(owner.register_state_dict_post_hook(partial(_supply, found)))
            self._handles.append(owner.register_load_state_dict_pre_hook(partial(_refuse_loading, found)))
        for name, module in self._layers:
            for method in ("merge", "unmerge"):
                setattr(module, method, partial(_refuse, f"adapters of {name!r} cannot be merged"))

    def check(self, is_bound: Callable[[nn.Parameter], bool]) -> None:
        for name, owner, attribute, parameter in self._parameters:
            if owner._parameters.get(attribute) is not parameter:
                raise RuntimeError(f"frozen weight {name!r} was replaced while it streams; {_REMEDY}")
            if parameter.requires_grad:
                raise RuntimeError(f"frozen weight {name!r} requires a gradient while it streams; {_REMEDY}")
            if not is_bound(parameter):
                raise RuntimeError(f"frozen weight {name!r} was written, cast or moved while it streams; {_REMEDY}")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for _, _, _, parameter in self._parameters:
            for attribute in (*_COPIES, COMES_AND_GOES):
                vars(parameter).pop(attribute, None)
        for _, module in self._layers:
            for method in ("merge", "unmerge"):
                vars(module).pop(method, None)


# What copy and pickle look up first, on the object itself.
_COPIES = ("__deepcopy__", "__reduce_ex__")


def _merges(module: nn.Module) -> bool:
    """Return whether this is one of PEFT's layers, which merge adapters into the weights of their base layer."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and callable(getattr(module, "merge", None))


def _value_at_home(parameter: Tensor, at_home: Mapping[int, Tensor]) -> Tensor:
    if is_quantised(parameter):
        return rewrapped(parameter, lambda inner: at_home[id(inner)])
    return at_home[id(parameter)]


def _supply(values: Mapping[str, Tensor], module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for attribute, value in values.items():
        if prefix + attribute in state:
            state[prefix + attribute] = value


def _refuse_loading(values: Mapping[str, Tensor], module: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    for attribute in values:
        if prefix + attribute in state:
            raise RuntimeError(f"frozen weight {prefix + attribute!r} cannot be loaded while it streams; {_REMEDY}")


def _refuse(problem: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"{problem} while its weights stream; {_REMEDY}")
