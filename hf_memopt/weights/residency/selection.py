"""The frozen weights of a model that stream, those that stay, and the modules that visit them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hf_memopt.weights.quantised import stored_tensors
from hf_memopt.weights.residency.guards import StreamedParameter
from hf_memopt.weights.residency.visit_order import Visit

# The smallest weights stay, up to this share of all: their copies would cost more time than their memory is worth.
_SMALL_SHARE = 0.01


@dataclass(frozen=True)
class Selection:
    """The parameters that stream, under each of their names, and the tensors that stay.

    Attributes:
        streamed: frozen parameters.
        others: parameters that train, buffers and small frozen parameters.
        small_bytes: of the small ones.
    """

    streamed: tuple[StreamedParameter, ...]
    others: tuple[Tensor, ...]
    small_bytes: int


def select(model: nn.Module) -> Selection:
    """Return the parameters that stream.

    Raises:
        ValueError: there is no frozen weight, or one cannot stream (sharded, sparse or on the meta device).
    """
    frozen: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen[parameter] = sum(inner.nbytes for inner in stored_tensors(name, parameter))
    if not any(frozen.values()):
        raise ValueError("model has no frozen weights that could stream; freeze its base with requires_grad_(False)")
    small, room = set(), int(_SMALL_SHARE * sum(frozen.values()))
    for parameter, num_bytes in sorted(frozen.items(), key=lambda each: each[1]):
        room -= num_bytes
        if room < 0:
            break
        small.add(parameter)
    streamed = tuple(
        StreamedParameter(f"{prefix}{attribute}", owner, attribute, parameter)
        for prefix, owner in _with_prefix(model)
        for attribute, parameter in owner._parameters.items()
        if parameter is not None and parameter in frozen and parameter not in small
    )
    names = {each.parameter for each in streamed}
    others = [*(each for each in model.parameters() if each not in names), *model.buffers()]
    return Selection(streamed, tuple(others), sum(frozen[parameter] for parameter in small))


def visits_of(model: nn.Module, slices_of: Mapping[int, tuple[int, ...]]) -> dict[nn.Module, Visit]:
    """Return by module the storages that its call visits: its own, and of a region those of all modules inside."""
    found: dict[nn.Module, Visit] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        is_region = reads_as_a_whole(module)
        visit = tuple(
            dict.fromkeys(
                number
                for parameter in module.parameters(recurse=is_region)
                for number in slices_of.get(id(parameter), ())
            )
        )
        if visit:
            found[module] = visit
        if not is_region:
            waiting.extend(module.children())
    return found


def reads_as_a_whole(module: nn.Module) -> bool:
    """Return whether code of a module may read the weights of modules inside, other than by calling them.

    A compiled region calls no module. PEFT's layers read the weights of their base, as DoRA does, but for plain LoRA.
    """
    if is_compiled(module):
        return True
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return False
    return not hasattr(module, "lora_A") or bool(getattr(module, "lora_variant", None))


def is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _with_prefix(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield f"{name}." if name else "", module
