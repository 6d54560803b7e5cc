"""Records what the training steps of any program compute, by torch's own seams; the program knows nothing of it."""

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_memopt.exactness.fingerprint import Fingerprint, parts_of
from hf_memopt.exactness.recording import Phase, Place, Recording
from hf_memopt.memory.process_peak import peak_bytes, reset_peak

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


class RecordingEnds(BaseException):  # no Exception, so that a program's own handlers let it pass
    """The steps to record are over."""


class KnownModels:
    """Models of several runs, so that those which run the same model give its tensors the same names."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.names: dict[int, str] = {}  # by id

    def whole(self, module: nn.Module) -> nn.Module:
        """Return the model of which a module is a part, or which it wraps, or else the module."""
        parameters = _ids(module)
        return next((model for model in self.models if parameters <= _ids(model)), module)


class Recorder:
    """Fills a `Recording` while it is entered.

    A call of a module that has trained parameters, from outside of other modules and with gradients recorded, is a
    forward pass; its inputs are recorded, and the module is a model from then on. Each backward pass that is called
    from outside of others records its roots as losses and then the `.grad` of all models' trained parameters and of
    the other leaves of its graph. A step ends with the first forward pass after an optimizer's update, or with
    `end_step`; weights, buffers and the states of its optimizers are recorded then.

    Args:
        num_steps: raise `RecordingEnds` when so many steps have ended. None, record all.
        perturbed: dtype to one rounding of which all weights are changed before the first step, at random. None,
            leave them.
        known: models of earlier runs, and the names of their tensors; this run's are added. Without it, names begin
            anew.
        on_tensors, on_optimizer: called with what a run may change, before it does: weights, buffers and other leaves,
            and optimizers.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        perturbed: torch.dtype | None = None,
        known: KnownModels | None = None,
        on_tensors: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
        on_optimizer: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self.recording = Recording()
        self._num_steps, self._perturbed = num_steps, perturbed
        self._known = known or KnownModels()
        self._on_tensors, self._on_optimizer = on_tensors, on_optimizer
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._started: set[int] = set()  # models whose weights at the start are recorded
        self._updated: list[Optimizer] = []  # in this step
        self._step, self._micro_batch, self._num_calls = 1, 0, 0
        self._depth_of_calls, self._depth_of_backward = 0, 0
        self._input_leaves: dict[int, tuple[str, Tensor]] = {}  # since the last backward pass, by id
        self._device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._active = ExitStack()

    def __enter__(self) -> Self:
        recorder, call, backward = self, nn.Module.__call__, torch.autograd.backward

        @functools.wraps(call)
        def call_recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Within backward, checkpointed layers run forward again.
            if torch.compiler.is_compiling() or recorder._depth_of_backward or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            if recorder._depth_of_calls == 0:
                recorder._before_forward(module, args, kwargs)
            elif torch.is_autocast_enabled(recorder._device.type):
                recorder.note_precision(torch.get_autocast_dtype(recorder._device.type))
            recorder._depth_of_calls += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                recorder._depth_of_calls -= 1

        @functools.wraps(backward)
        def backward_recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if recorder._depth_of_backward or recorder._depth_of_calls:  # of a checkpoint, or of a module's own
                backward(tensors, *args, **kwargs)
                return
            leaves = recorder._before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
            recorder._depth_of_backward += 1
            try:
                backward(tensors, *args, **kwargs)
            finally:
                recorder._depth_of_backward -= 1
            recorder._after_backward(leaves)

        enter = self._active.enter_context
        enter(patch.object(nn.Module, "__call__", call_recorded))
        enter(patch.object(torch.autograd, "backward", backward_recorded))
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_update),
            (register_optimizer_step_post_hook, self._after_update),
        ):
            self._active.callback(register(hook).remove)
        enter(self._warnings())
        reset_peak(self._device)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active.close()
        if self._updated and not isinstance(error, Exception):
            self.end_step()
        self.recording.peak_bytes = peak_bytes(self._device)

    def add_model(self, module: nn.Module) -> None:
        """Name parameters after this module, before its first forward pass."""
        if not any(_trained(module)):
            return
        whole = self._known.whole(module)
        if not any(whole is model for model in self._models):
            self._models.append(whole)
        if not any(whole is model for model in self._known.models):
            self._known.models.append(whole)

    def note_precision(self, dtype: torch.dtype) -> None:
        self.recording.precision = str(dtype).removeprefix("torch.")

    def add_results(self, results: Any) -> None:
        """Record the tensors in what a step has returned."""
        with self._recording():
            for name, tensor in _named_tensors(results, ""):
                self._add("result", name, tensor, micro_batch=0)

    def end_step(self) -> None:
        """Record weights and the states of the optimizers that have made an update."""
        with self._recording() as began:
            self.recording.step_s.append(began - self._began)
            if self._updated:
                for name, tensor in self._named_weights():
                    self._add("weight", name, tensor, micro_batch=0)
                for name, tensor in self._named_states():
                    self._add("optimizer", name, tensor, micro_batch=0)
            self._updated, self._micro_batch, self._num_calls = [], 0, 0
            self._step += 1
        self._began = time.perf_counter()
        if self._num_steps is not None and self._step > self._num_steps:
            raise RecordingEnds

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(_trained(module)):
            return
        if self._updated:
            self.end_step()
        with self._recording():
            self.add_model(module)
            self._start()
            self._num_calls += 1
            call = "" if self._num_calls == 1 else f" (call {self._num_calls})"
            for name, tensor in [*_named_tensors(args, ""), *_named_tensors(kwargs, "")]:
                self._add("input", name + call, tensor, self._micro_batch + 1)
                if tensor.is_leaf and tensor.requires_grad:
                    self._input_leaves[id(tensor)] = f"input {name}{call}", tensor
        if not self.recording.step_s and self._micro_batch == 0:
            self._began = time.perf_counter()  # loading and the like are no part of the first step

    def _start(self) -> None:
        for model in self._models:
            if id(model) in self._started:
                continue
            self._started.add(id(model))
            self._on_tensors([*model.parameters(), *model.buffers()])
            self.recording.has_dropout |= any(map(_draws_masks, model.modules()))
            for name, tensor in self._named(model, _weights_of(model)):
                self._add("start", name, tensor, micro_batch=0, step=0)
            if self._perturbed is not None:
                _perturb(model, self._perturbed)

    def _before_backward(self, roots: list[Tensor]) -> list[Tensor]:
        if self._updated:  # by a program that calls no modules
            self.end_step()
        with self._recording():
            self._micro_batch += 1
            self._num_calls = 0
            for number, root in enumerate(roots, start=1):
                self._add("loss", "loss" if len(roots) == 1 else f"loss {number}", root, self._micro_batch)
            named = set(self._input_leaves).union(*map(_ids, self._models))
            unnamed = [leaf for leaf in _leaves(roots) if id(leaf) not in named and _has_memory(leaf)]
            self._on_tensors([*unnamed, *(leaf for _, leaf in self._input_leaves.values())])
            return unnamed

    def _after_backward(self, leaves: Iterable[Tensor]) -> None:
        with self._recording():
            unnamed = [(f"leaf {number}", leaf) for number, leaf in enumerate(leaves, start=1)]
            for name, leaf in [*self._named_parameters(), *self._input_leaves.values(), *unnamed]:
                if leaf.grad is not None:
                    self._add("gradient", name, leaf.grad, self._micro_batch)
            self._input_leaves.clear()

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
            self._on_optimizer(optimizer)

    def _after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(optimizer is each for each in self._updated):
            self._updated.append(optimizer)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield trained parameters, those of the last layers first, as backward reaches them."""
        seen: set[int] = set()
        for model in self._models:
            for name, parameter in self._named(model, reversed(list(_trained(model)))):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for model in self._models:
            yield from self._named(model, _weights_of(model))

    def _named(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        number = next(i for i, each in enumerate(self._models, start=1) if each is model)
        prefix = f"model {number}: " if number > 1 else ""
        for name, tensor in tensors:
            yield self._known.names.setdefault(id(tensor), prefix + name), tensor

    def _named_states(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for number, optimizer in enumerate(self._optimizers, start=1):
            if not any(optimizer is each for each in self._updated):
                continue
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for position, parameter in enumerate(parameters):
                name = names.get(id(parameter), f"parameter {position} of optimizer {number}")
                for key, state in _named_tensors(optimizer.state.get(parameter, {}), ""):
                    yield f"{key} of {name}", state

    def _add(self, phase: Phase, name: str, tensor: Tensor, micro_batch: int, step: int | None = None) -> None:
        for suffix, part in parts_of(tensor):
            if part.numel() and part.device.type != "meta":  # others are placeholders of weights held elsewhere
                place = Place(self._step if step is None else step, micro_batch, phase, name + suffix)
                self.recording.tensors[place] = Fingerprint.of(part)

    @contextmanager
    def _recording(self) -> Iterator[float]:
        """Count the time inside as recording, not as the program's."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        began = time.perf_counter()
        try:
            with torch.no_grad():
                yield began
        finally:
            took = time.perf_counter() - began
            self.recording.recording_s += took
            self._began += took

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Note torch's warnings of operations that are not deterministic, and show all warnings as before."""
        show = warnings.showwarning

        def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            text = str(message)
            if _NOT_DETERMINISTIC in text:
                operation = text.split(_NOT_DETERMINISTIC)[0].strip()
                if operation not in self.recording.not_deterministic:
                    self.recording.not_deterministic.append(operation)
            show(message, *args, **kwargs)

        with patch.object(warnings, "showwarning", note):
            yield


def _draws_masks(module: nn.Module) -> bool:
    """Return whether a module drops elements: by its class, or by a share such as Llama's `attention_dropout`."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    shares = (value for name, value in vars(module).items() if "dropout" in name)
    return any(isinstance(share, float) and share > 0 for share in shares)


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _trained(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((_bare(name), each) for name, each in module.named_parameters() if each.requires_grad)


def _weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from _trained(model)
    yield from ((_bare(name), buffer) for name, buffer in model.named_buffers())


def _bare(name: str) -> str:
    """Return a parameter's name as it is without wrappers of modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested mappings and sequences, with the path to each."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_tensors(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from _named_tensors(each, f"{name}[{position}]")


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves to which a backward pass from `roots` adds gradients, as far as its graph shows them."""
    found: list[Tensor] = [root for root in roots if root.is_leaf and root.requires_grad]
    stack, seen = [root.grad_fn for root in roots if root.grad_fn is not None], set()
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor can be read: FSDP2 frees the whole parameters of which it keeps shards."""
    return all(part.untyped_storage().nbytes() for _, part in parts_of(tensor) if part.numel())


def _perturb(model: nn.Module, dtype: torch.dtype) -> None:
    """Change each weight by one unit in its last place of `dtype`, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            for _, part in parts_of(parameter):
                if part.is_floating_point() and part.dtype.itemsize > 1:
                    signs = torch.randint(0, 2, part.shape, generator=generator).mul_(2).sub_(1)
                    eps = torch.finfo(dtype if dtype.itemsize < part.dtype.itemsize else part.dtype).eps
                    part.mul_((1 + eps * signs).to(part))
