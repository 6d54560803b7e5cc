"""The places where contexts enclose a trainer's work: its forward passes with their losses, and calls of its models."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_memopt.uncompiled import graph_break, uncompiled

LossContext = Callable[[], AbstractContextManager[Any]]

# The one method of a trainer that encloses forward and loss and not backward.
_SEAM = "compute_loss_context_manager"


def enclose(trainer: Trainer, context: LossContext) -> Callable[[], None]:
    """Enter a context around each forward pass and its loss, inside those added before; return how to undo that."""
    replaced = vars(trainer).get(_SEAM)
    if replaced is None:
        replaced = _Contexts(getattr(trainer, _SEAM))
        setattr(trainer, _SEAM, replaced)
    elif not isinstance(replaced, _Contexts):
        raise ValueError(f"{_SEAM} of this trainer is replaced already, by {replaced!r}; leave that out")
    contexts = replaced.contexts
    contexts.append(context)

    def undo() -> None:
        contexts.remove(context)
        if not contexts:
            delattr(trainer, _SEAM)

    return undo


def enclose_calls(model: nn.Module, context: Callable[[str], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Enter a context around each call of a model, and of the models of transformers inside; return how to undo that.

    Trainers call a model outside of losses too, to generate and to score, and sometimes the one inside of an adapter's.
    `context` gets the names of model and arguments, by which calls that take another way through the model differ.
    """
    undo = ExitStack()
    for module in model.modules():
        if module is model or isinstance(module, PreTrainedModel):
            undo.callback(enclose_calls_of(module, context))
    return undo.close


def enclose_calls_of(module: nn.Module, context: Callable[[str], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Do so for one module alone."""
    calls, undo = _Calls(context), ExitStack()
    undo.callback(module.register_forward_pre_hook(calls.enter, prepend=True, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(calls.leave, always_call=True).remove)
    return undo.close


class _Calls:
    def __init__(self, context: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._context = context
        self._entered: list[AbstractContextManager[Any]] = []

    @graph_break
    @uncompiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        entered = self._context(f"{type(module).__name__}({', '.join(sorted(kwargs))})")
        entered.__enter__()
        self._entered.append(entered)

    @graph_break
    @uncompiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:  # the hook runs too where an exception came before the call
            failure = sys.exc_info() if output is None else (None, None, None)
            self._entered.pop().__exit__(*failure)


class _Contexts:
    """Stands for the method: enters the trainer's own context and then the others."""

    def __init__(self, plain: LossContext) -> None:
        self.contexts: list[LossContext] = []
        self._plain = plain

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in (self._plain, *self.contexts):
                stack.enter_context(context())
            yield
