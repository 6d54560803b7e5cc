"""torch's own samples of operators and modules as functions of leaves."""

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import hypothesis
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# Operators for which unwritten memory is NaN, so that every run reads the same: RReLU saves its noise before drawing
# it, and torch's checkpointing stops between the two.
_READ_UNINITIALISED = ("nn.functional.rrelu",)

DTYPES = (torch.float32, torch.complex64, torch.bfloat16)
SEED = 1234


@dataclass
class Case:
    """A function of one tensor for each of `leaves`, differentiated by those and the model's parameters."""

    label: str
    function: Callable[..., Any]
    leaves: list[Tensor]
    model: nn.Module | None = None
    layout: str = "dense"
    has_second: bool = True
    fills_memory: bool = False
    _buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        buffers = self.model.buffers() if self.model else ()
        self._buffers = [(each, each.clone()) for each in buffers if each.layout is torch.strided]

    @property
    def all_leaves(self) -> list[Tensor]:
        return self.leaves + (list(self.model.parameters()) if self.model else [])

    def inputs(self) -> list[Tensor]:
        """Return inputs made from the leaves by operations, so that plans can recompute them."""
        return [LAYOUTS[self.layout](leaf * 1) if leaf.layout is torch.strided else leaf * 1 for leaf in self.leaves]

    def reset(self) -> None:
        """Restore random numbers and buffers, so that every run begins alike."""
        torch.manual_seed(SEED)
        random.seed(SEED)
        for buffer, first in self._buffers:
            buffer.data = first.clone()

    def has_written_buffers(self) -> bool:
        return any(not torch.equal(now, first) for now, first in self._buffers)


def with_gaps(tensor: Tensor) -> Tensor:
    """Return the tensor as every second element of its memory, with complex values lazily conjugated."""
    return torch.stack((tensor, tensor), -1)[..., 1].conj()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"dense": lambda tensor: tensor, "gaps": with_gaps}


def operator_cases(name: str, most: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Yield at most `most` samples for each dtype, spread over torch's list, every second one with gaps in memory."""
    op_db = _database("common_methods_invocations", "op_db")
    (operator,) = (each for each in op_db if each.full_name == name and each.supports_autograd)
    for dtype in dtypes:
        if dtype not in operator.supported_backward_dtypes("cpu"):
            continue
        samples = list(operator.sample_inputs("cpu", dtype, requires_grad=True))
        for index in spread(len(samples), most):
            sample = samples[index]
            layout = ("dense", "gaps")[index % 2]
            label = f"{name} {str(dtype)[6:]} sample {index} {layout}"
            arguments = (sample.input, *sample.args), sample.kwargs
            options: dict[str, Any] = {
                "layout": layout,
                "has_second": operator.supports_gradgrad,
                "fills_memory": name in _READ_UNINITIALISED,
            }
            case = Case(label, *_function(_processed(operator.op, sample), *arguments), **options)
            yield case
            if operator.get_inplace() and operator.supports_inplace_autograd and _fits_in_place(case, sample):
                in_place = _processed(_in_place(operator.get_inplace()), sample)
                yield Case(f"{label} in place", *_function(in_place, *arguments), **options)


def operator_names() -> list[str]:
    """Return all operators in torch's database that support autograd."""
    op_db = _database("common_methods_invocations", "op_db")
    return sorted(operator.full_name for operator in op_db if operator.supports_autograd)


def _processed(operator: Callable[..., Any], sample: Any) -> Callable[..., Any]:
    """Return the operator's unique part of the result; eigenvectors, for example, have any phase."""
    return lambda *args, **kwargs: sample.output_process_fn_grad(operator(*args, **kwargs))


def _in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: operator(tensor * 1, *args, **kwargs)


def _fits_in_place(case: Case, sample: Any) -> bool:
    if sample.broadcasts_input or not isinstance(sample.input, Tensor) or not sample.input.requires_grad:
        return False
    case.reset()
    with torch.no_grad():
        try:
            output = case.function(*case.inputs())
        except RuntimeError:  # the case itself reports the error
            return False
    return isinstance(output, Tensor) and (output.shape, output.dtype) == (sample.input.shape, sample.input.dtype)


def module_cases(name: str, most: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Yield at most `most` samples for each dtype, in training and in evaluation mode."""
    module_db = _database("common_modules", "module_db")
    (info,) = (each for each in module_db if each.name == name)
    for dtype in dtypes:
        if dtype not in info.supported_dtypes("cpu") and dtype is not torch.bfloat16:
            continue
        for training in (True, False):
            torch.manual_seed(SEED)
            samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
            for index in spread(len(samples), most):
                built, given = samples[index].constructor_input, samples[index].forward_input
                model = info.module_cls(*built.args, **built.kwargs).to(dtype).train(training)
                if info.is_lazy:
                    with torch.no_grad():
                        model(*given.args, **given.kwargs)
                label = f"{name} {str(dtype)[6:]} {'training' if training else 'evaluation'} sample {index}"
                function, leaves = _function(model, given.args, given.kwargs)
                yield Case(label, Sampled(model, function), leaves, model, has_second=info.supports_gradgrad)


class Sampled(nn.Module):
    """A model with some arguments filled in, and still a module whose buffers `SelectiveCheckpoint` finds."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


def module_names() -> list[str]:
    module_db = _database("common_modules", "module_db")
    return sorted(info.name for info in module_db)


def _database(module: str, name: str) -> Any:
    """Return one of torch's databases, without the global settings of an import of torch's test suite."""
    with patch.object(torch.backends, "disable_global_flags", lambda: None):
        found = getattr(importlib.import_module(f"torch.testing._internal.{module}"), name)
    hypothesis.settings.load_profile("repeatable")
    return found


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / max(1, most - 1)) for place in range(most)})


def _function(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function of the tensors that require gradients among the arguments, and leaves with their values."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad]

    def function(*inputs: Tensor) -> Any:
        values = {id(tensor): value for tensor, value in zip(tensors, inputs, strict=True)}

        def fill(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            # Some operators write to arguments such as running means, so that each call gets its own.
            return values[id(argument)] if id(argument) in values else argument.clone()

        filled_args, filled_kwargs = tree_map(fill, (args, kwargs))
        return call(*filled_args, **filled_kwargs)

    return function, [tensor.detach().requires_grad_() for tensor in tensors]


def differentiable(results: Any) -> list[Tensor]:
    return [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.requires_grad]


def values_in(results: Any) -> list[Any]:
    return [each.detach() if isinstance(each, Tensor) else each for each in tree_leaves(results)]
