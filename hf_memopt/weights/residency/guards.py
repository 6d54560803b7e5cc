"""Guards of streamed parameters: their state is saved and compared at home, and nobody may change them.

`ModelState` keeps the state of a model before its weights stream, which comes back where that fails.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from hf_memopt.autograd_state import COMES_AND_GOES, bytes_of
from hf_memopt.weights.homes.packed_weights import OffsetTensor, is_quantised, rewrapped, span_bytes, views

REMEDY = "call remove() of its StreamedWeights first"


class StreamedParameter(NamedTuple):
    """A streamed parameter, its full name, and the module that has it under its last name."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter


class ParameterGuards:
    """Guards the parameters as long as they stream.

    A state dict gets their values at home. Loading other values raises a RuntimeError that names the weight, unless
    they train. `check` finds those that were replaced, unfrozen, written, cast or moved.

    Args:
        at_home: returns a plain tensor, or one inside a quantised weight, as it is at home.
        check_home: to be called before each read of a value at home.
        is_unchanged: whether a parameter is bound as it was, and nobody has written it.
        load: writes a parameter and its home; None where they are frozen.
        show: called with a parameter that a state dict is about to show, which later updates are to change.
    """

    def __init__(
        self,
        parameters: Sequence[StreamedParameter],
        at_home: Callable[[Tensor], Tensor],
        check_home: Callable[[], None],
        is_unchanged: Callable[[nn.Parameter], bool],
        load: Callable[[Tensor, Tensor], None] | None = None,
        show: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._parameters, self._is_unchanged = parameters, is_unchanged
        self.check_home, self.load, self.show = check_home, load, show
        self._handles: list[RemovableHandle] = []
        self._states: dict[Any, _StateAtHome] = {}
        # By the id of a tensor at home, that tensor and what state dicts have got.
        self.handed_out: dict[int, tuple[Tensor, Tensor]] = {}
        for each in parameters:
            value = partial(at_home, each.parameter)
            if is_quantised(each.parameter):  # around what is at home, wherever `to(device)` puts the parameter
                value = partial(_itself, rewrapped(each.parameter, at_home))
            self._states.setdefault(each.owner, _StateAtHome(self)).values[each.attribute] = each, value
        for owner, state in self._states.items():
            # torch writes an attribute of the hook, which a method has no room for.
            self._handles.append(owner.register_state_dict_post_hook(partial(state.supply)))
            self._handles.append(owner.register_load_state_dict_pre_hook(state.begin_loading))
            self._handles.append(owner.register_load_state_dict_post_hook(state.end_loading))

    def check(self) -> None:
        for each in self._parameters:
            self.check_one(each)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def check_one(self, each: StreamedParameter) -> None:
        name, owner, attribute, parameter = each
        if owner._parameters.get(attribute) is not parameter:
            raise RuntimeError(f"weight {name!r} was replaced while it streams; {REMEDY}")
        if parameter.requires_grad and self.load is None:
            raise RuntimeError(f"frozen weight {name!r} requires a gradient while it streams; {REMEDY}")
        if not self._is_unchanged(parameter) or self._states[owner].is_written(attribute):
            raise RuntimeError(f"weight {name!r} was written, cast or moved while it streams; {REMEDY}")


def _itself(value: Tensor) -> Tensor:
    return value


def _with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a storage of its own: `safetensors.torch.save_model` refuses parts of storages."""
    first = view.storage_offset() * view.itemsize
    memory = torch.from_numpy(bytes_of(view)[first : first + span_bytes(view)].numpy())
    (found,) = views([OffsetTensor(view, 0, view.stride())], memory)
    return found


class NotCopied:
    """An object inside of a model whose weights stream: copies of the model share it, and pickles are refused."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model cannot be pickled while its weights stream; save its state_dict()")


_ValueAtHome = tuple[StreamedParameter, Callable[[], Tensor]]


class _StateAtHome(NotCopied):
    """Saves a module's streamed weights from their home, and loads them, where they train, to there.

    A checkpoint of the same base has nothing new for frozen ones. A copy of the module has weights of its own.
    """

    def __init__(self, guards: ParameterGuards) -> None:
        self._guards = guards
        self.values: dict[str, _ValueAtHome] = {}
        self._shown: dict[str, set[int]] = defaultdict(set)  # the ids of tensors at home that state dicts have got
        self._taken: set[str] = set()

    def supply(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        streamed = self._streamed(module, state, prefix)
        for parameter, _ in streamed:
            self._guards.check_one(parameter)
            if self._guards.show is not None and parameter.parameter.requires_grad:
                self._guards.show(parameter.parameter)
        self._guards.check_home()
        for parameter, value in streamed:
            alias = partial(self._alias, self._shown[parameter.attribute])
            state[prefix + parameter.attribute] = rewrapped(value(), alias)

    def is_written(self, attribute: str) -> bool:
        """Return whether what a state dict has got was written, which no home keeps."""
        handed_out = self._guards.handed_out  # without what a tied weight has loaded
        shown = (handed_out[each] for each in self._shown.get(attribute, ()) if each in handed_out)
        return any(tensor._version for _, tensor in shown)

    def _alias(self, shown: set[int], view: Tensor) -> Tensor:
        """Return a tensor on the memory of a view at home, which counts writes together with others of it."""
        handed_out = self._guards.handed_out
        if id(view) not in handed_out:
            with torch.inference_mode(False):  # in which writes are not counted
                handed_out[id(view)] = view, _with_own_storage(view)
        shown.add(id(view))
        return handed_out[id(view)][1].detach()

    def begin_loading(self, module: nn.Module, state: Any, prefix: str, options: Any, *others: Any) -> None:
        streamed = self._streamed(module, state, prefix)
        if streamed:
            self._guards.check_home()
        for parameter, value in streamed:
            name = prefix + parameter.attribute
            if self._guards.load is not None and not is_quantised(parameter.parameter):
                if options.get("assign_to_params_buffers"):
                    raise RuntimeError(f"weight {name!r} cannot be replaced while it streams; load with assign=False")
                if not isinstance(state[name], Tensor) or state[name].shape != parameter.parameter.shape:
                    continue  # torch's message names both shapes
                self._guards.load(parameter.parameter, state[name])
                for each in self._shown.pop(parameter.attribute, ()):  # one may be written before it is loaded
                    self._guards.handed_out.pop(each, None)
            elif not _is_equal(state[name], value()):
                raise RuntimeError(f"frozen weight {name!r} cannot be loaded while it streams; {REMEDY}")
            del state[name]
            self._taken.add(name)

    def end_loading(self, module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in self._taken]
        self._taken.clear()

    def _streamed(self, module: nn.Module, state: Any, prefix: str) -> list[_ValueAtHome]:
        return [
            found
            for attribute, found in self.values.items()
            if prefix + attribute in state and hasattr(module._parameters.get(attribute), COMES_AND_GOES)
        ]


def _is_equal(loaded: Any, value: Tensor) -> bool:
    if is_quantised(value) or is_quantised(loaded) or loaded.dtype != value.dtype:
        return False
    return torch.equal(loaded.to(value.device), value)


# Attributes of every module: its hooks and parameters among them.
OF_ALL_MODULES = frozenset(vars(nn.Module()))


class ModelState:
    """Classes, attributes and hooks of modules and tensors, and the memory of tensors, which it keeps."""

    @torch.inference_mode(False)
    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        attributes = [vars(each) for each in (*modules, *tensors)]
        hooks = [vars(each)[name] for each in modules for name in OF_ALL_MODULES & vars(each).keys()]
        self._classes = [(each, type(each)) for each in (*modules, *tensors)]
        self._mappings = [(each, dict(each)) for each in (*attributes, *hooks) if isinstance(each, dict)]
        # The tensors inside of others are replaced together with those.
        self._memory = [(each, each.data) for each in tensors if not is_traceable_wrapper_subclass(each)]

    def put_back(self) -> None:
        for found, kind in self._classes:
            if type(found) is not kind:
                found.__class__ = kind
        for mapping, before in self._mappings:
            mapping.update(before)
            for name in mapping.keys() - before.keys():
                del mapping[name]
        for tensor, memory in self._memory:
            tensor.data = memory
