"""Finds equal layers of a transformers model, so that a few of them stand for all."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hf_memopt.planning.accounting.repeated_layers import Layers
from hf_memopt.planning.simulated_step import RepeatedLayers, SimulatedStep

# Attributes in which equal layers differ.
_POSITION = {"layer_idx", "layer_id", "layer_number"}


def equal_layers(model: nn.Module) -> Layers | None:
    """Return where a model's equal layers are: in its one longest list of modules that lies in no other list.

    They are equal, or return every few layers, if their modules have the same types, sizes and settings. The first
    group may differ.
    """
    lists = list(_outer_lists(model, ""))
    longest = max((len(layers) for _, layers in lists), default=0)
    candidates = [(name, layers) for name, layers in lists if len(layers) == longest]
    if len(candidates) != 1:
        return None
    name, layers = candidates[0]
    kinds = [_kind(layer) for layer in layers]
    for period in range(1, len(kinds) // 2):
        if all(kinds[number] == kinds[number - period] for number in range(2 * period, len(kinds))):
            return Layers(name, len(kinds), period)
    return None


def under_offloading(layers: Layers | None, offload: str) -> Layers | None:
    """Return equal layers, a few of which stand for all in a mode of `ActivationOffloader`, or None if none do.

    A plan ("auto") treats each layer as it likes. With "all" no more is on its way than two of the largest storages:
    most layers save as much, so that it concerns the next layer at most. With "inputs" a layer's input, made by the one
    before, leaves when the second after it begins.
    """
    if layers is None or offload in ("off", "all"):
        return layers
    return replace(layers, reach=3) if offload == "inputs" and layers.period == 1 else None


def with_num_layers(config: Any, layers: Layers, count: int) -> Any:
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()  # itself, unless a model for text alone is made of a part
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers.count:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return shorter


def told_by_few(
    step_of: Callable[[Any, RepeatedLayers | None], SimulatedStep], config: Any, layers: Layers | None
) -> SimulatedStep:
    if layers is None:
        return step_of(config, None)
    return step_of(config, RepeatedLayers(layers, lambda count: step_of(with_num_layers(config, layers, count), None)))


def _outer_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield full, child
        else:
            yield from _outer_lists(child, full)


def _kind(module: nn.Module) -> tuple[Any, ...]:
    settings = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if name not in _POSITION and isinstance(value, bool | int | float | str | None)
    )
    weights = tuple(
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    )
    children = tuple((name, _kind(child)) for name, child in module.named_children())
    return type(module), settings, weights, children
