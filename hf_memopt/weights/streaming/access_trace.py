"""Learns which weights a module reads, and when, by watching it once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Read:
    """One operation that read weights.

    Attributes:
        slices: indices into `PackedWeights.slices`.
        module: name of the innermost running module; None outside of all.
        late: whether that module had called another one before, which may have taken the weights' place.
    """

    slices: tuple[int, ...]
    module: str | None
    late: bool = False


@dataclass
class _Call:
    """A running module, or None for code outside of all, and the weights that it has read, in order."""

    module: str | None
    has_called: bool = False
    slices: dict[int, None] = field(default_factory=dict)


class Tracer:
    """Records the reads of a module's weights in `reads`, in order, and the names of modules that ran in `called`.

    `slices_of` has slices by the id of a parameter or buffer. `before_read` gets, before each read, the slices that the
    innermost module has read since it was entered.

    A module's own parameters and buffers count as read when it is called, since its operators may be hidden from torch
    (fused kernels); all other reads are seen as operators. An embedding that looks up fewer rows than it has does not
    count: see `StreamedVisits`. Costs some microseconds per operator. Operators are watched below autograd, where
    watching changes no result; a `TorchFunctionMode` would make `nn.MultiheadAttention` take another path.
    """

    def __init__(
        self,
        module: nn.Module,
        slices_of: Mapping[int, tuple[int, ...]],
        before_read: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.reads: list[Read] = []
        self.called: set[str] = set()
        self._module = module
        self._slices_of = slices_of
        self._before_read = before_read
        self._running: list[_Call] = []
        # True while `before_read` copies weights, by operators that read them too.
        self._bringing = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self._running = [_Call(None)]
        with ExitStack() as stack:
            for name, module in self._module.named_modules():
                entered = module.register_forward_pre_hook(self._on_entry(name, own_slices(module, self._slices_of)))
                stack.callback(entered.remove)
                left = module.register_forward_hook(self._on_exit(name), always_call=True)
                stack.callback(left.remove)
            stack.enter_context(_Watch(self._watch))
            yield

    def _on_entry(self, name: str, own: tuple[int, ...]) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running[-1].has_called = True
            self._running.append(_Call(name))
            self.called.add(name)
            if not isinstance(module, nn.Embedding):
                self._record(own)

        return enter

    def _on_exit(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # This hook also runs when an exception came before the module was entered.
            if self._running[-1].module == name:
                self._running.pop()

        return leave

    def _watch(self, function: Any, arguments: tuple[Any, ...]) -> None:
        gathers = function is torch.ops.aten.embedding.default and takes_few_rows(*arguments[:2])
        if gathers or self._bringing:
            return
        self._record(slices_read(tree_leaves(arguments), self._slices_of))

    def _record(self, slices: tuple[int, ...]) -> None:
        if slices:
            call = self._running[-1]
            call.slices.update(dict.fromkeys(slices))
            self.reads.append(Read(slices, call.module, call.module is not None and call.has_called))
            self._bringing = True
            try:
                self._before_read(tuple(call.slices))
            finally:
                self._bringing = False


def own_slices(module: nn.Module, slices_of: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return slices_read(own, slices_of)


def slices_read(leaves: Iterable[Any], slices_of: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the slices of the weights among an operator's arguments."""
    return tuple(dict.fromkeys(index for leaf in leaves for index in slices_of.get(id(leaf), ())))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, before: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._before(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)


def takes_few_rows(table: Tensor, indices: Tensor) -> bool:
    """Return whether an embedding's rows are better gathered than its table brought."""
    return indices.numel() < table.shape[0]
