"""The state of a model before its weights stream, which comes back where that fails."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Attributes of every module: its hooks and parameters among them.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class ModelState:
    """Classes, attributes and hooks of modules and tensors, and the memory of tensors, which it keeps."""

    @torch.inference_mode(False)
    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        attributes = [vars(each) for each in (*modules, *tensors)]
        hooks = [vars(each)[name] for each in modules for name in _OF_ALL_MODULES & vars(each).keys()]
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
