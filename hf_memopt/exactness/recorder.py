"""Records the tensors that training steps of any program compute, by torch's own seams and without its help."""

import functools
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hf_memopt.autograd_state import COMES_AND_GOES, in_backward
from hf_memopt.exactness.recording import Fingerprint, Phase, Recording, TensorPlace, parts_of
from hf_memopt.memory.device_counters import peak_bytes, reset_peak
from hf_memopt.memory.leaks.live_storages import graph_nodes

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


class RecordingEnds(BaseException):  # no Exception, so that a program's own handlers let it pass
    """The steps to record are over."""


class KnownModels:
    """Models of several runs, so that those which run the same model give its tensors the same names."""

    def __init__(self) -> None:
        self.numbers: dict[nn.Module, int] = {}
        self.names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self.leaves: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # outside of models

    def whole(self, module: nn.Module) -> nn.Module:
        """Return the model of which a module is a part, or which it wraps, or else the module."""
        parameters = _ids(module)
        return next((model for model in self.numbers if parameters <= _ids(model)), module)


class Recorder:
    """Fills a `Recording` while it is entered.

    A call of a module that has trained parameters, from outside of other modules and with gradients recorded, is a
    forward pass; its inputs are recorded, and the module is a model from then on. Each backward pass that is called
    from outside of others records its roots as losses and then the `.grad` of all models' trained parameters and of
    the other leaves of its graph. A step ends with the first forward pass after an optimizer's update, or with
    `end_step`; weights, buffers and the states of its optimizers are recorded then.

    Args:
        num_steps: raise `RecordingEnds` when so many steps have ended. None, record all.
        perturbed: name of a dtype, by one rounding of which all weights are changed before the first step. None,
            leave them.
        in_float32: switch off each autocast, and TF32.
        known: models of earlier runs, and the names of their tensors; this run's are added. Without it, names begin
            anew.
        keeper: its `add_model`, `add_leaves` and `add_optimizer` are called before a run may change models with their
            weights and buffers, other leaves, and optimizers.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        perturbed: str | None = None,
        in_float32: bool = False,
        known: KnownModels | None = None,
        keeper: Any = None,
    ) -> None:
        self.recording = Recording()
        self._num_steps, self._perturbed, self._in_float32 = num_steps, perturbed, in_float32
        self._known = known or KnownModels()
        self._keeper = keeper
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        # Weights before a model's first pass.
        self._begun: dict[nn.Module, list[tuple[Tensor, list[tuple[str, Fingerprint]]]]] = {}
        self._started: set[int] = set()  # models of which these are recorded
        self._updated: set[Optimizer] = set()  # in this step
        self._sums: dict[tuple[int, int], complex] = {}  # of weights before an update, until an optimizer is called
        self._step, self._micro_batch = 1, 0
        self._num_calls = Counter[int]()  # in this micro-batch, by model
        self._depth_of_calls, self._is_without_graph, self._is_over = 0, False, False
        self._input_leaves: dict[int, tuple[str, Tensor]] = {}  # since the last backward pass, by id
        self._device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._active = ExitStack()

    def __enter__(self) -> Self:
        recorder, call, backward = self, nn.Module.__call__, torch.autograd.backward
        autocast: Any = torch.autocast.__enter__

        @functools.wraps(call)
        def call_recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Compiled functions keep this one. Within backward, checkpointed layers run forward again. The tensors of
            # torch.func hold those of many calls.
            is_in_func = torch._C._functorch.maybe_current_level() is not None
            if torch.compiler.is_compiling() or recorder._is_over or in_backward() or is_in_func:
                return call(module, *args, **kwargs)
            if not torch.is_grad_enabled():
                with recorder._without_graph(module):
                    return call(module, *args, **kwargs)
            if recorder._depth_of_calls == 0:
                recorder._before_forward(module, args, kwargs)
            recorder._depth_of_calls += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                recorder._depth_of_calls -= 1

        @functools.wraps(backward)
        def backward_recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if in_backward() or recorder._depth_of_calls:  # of a checkpoint, or of a module's own
                backward(tensors, *args, **kwargs)
                return
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            leaves = recorder._before_backward(roots)
            backward(roots, *args, **kwargs)
            recorder._after_backward(leaves)

        @functools.wraps(autocast)
        def autocast_noted(context: Any) -> Any:
            if not context._enabled:
                return autocast(context)
            recorder.note_precision(context.fast_dtype)
            with patch.object(context, "_enabled", not recorder._in_float32):
                return autocast(context)

        enter = self._active.enter_context
        enter(patch.object(torch.autocast, "__enter__", autocast_noted))
        enter(patch.object(nn.Module, "__call__", call_recorded))
        enter(patch.object(torch.autograd, "backward", backward_recorded))
        kind = self._device.type
        self._active.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
        self._active.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._active.callback(register_optimizer_step_post_hook(lambda each, *_: self._updated.add(each)).remove)
        enter(self._warnings())
        reset_peak(self._device)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._active.close()
        self._is_over = True
        self.recording.peak_bytes = peak_bytes(self._device)
        if not isinstance(error, Exception) and self._has_updated():
            self._record_end()

    def add_model(self, module: nn.Module) -> None:
        """Name parameters after this module, before its first forward pass."""
        if _is_trained(module):
            self._added(module)

    def _added(self, module: nn.Module) -> nn.Module:
        """Return the model that a module is, or belongs to, and count it among this run's."""
        whole = self._known.whole(module)
        if not any(whole is model for model in self._models):
            self._models.append(whole)
        self._known.numbers.setdefault(whole, len(self._models))  # a model keeps the one of an earlier run
        return whole

    def note_precision(self, dtype: torch.dtype) -> None:
        self.recording.precision = str(dtype).removeprefix("torch.")

    def add_results(self, results: Any) -> None:
        with self._recording():
            for name, tensor in _named_tensors(results, ""):
                self._add("result", name, tensor, micro_batch=0)

    def end_step(self) -> None:
        """Record weights, buffers, and the states of the optimizers that have made an update."""
        self._record_end()
        if self._num_steps is not None and self._step > self._num_steps:
            raise RecordingEnds

    def _record_end(self) -> None:
        with self._recording() as began:
            self.recording.step_s.append(began - self._began)
            for model in self._models:
                at_home = _at_home(model)
                for name, tensor in self._named(model):
                    self._add("weight", name, at_home.get(id(tensor), tensor), micro_batch=0)
            for optimizer in (each for each in self._optimizers if each in self._updated):
                for name, parameter in self._parameters_of(optimizer):
                    for key, state in _named_tensors(optimizer.state.get(parameter, {}), ""):
                        self._add("optimizer", f"{key} of {name}", state, micro_batch=0)
            self._updated, self._sums, self._micro_batch = set(), {}, 0
            self._num_calls.clear()
            self._step += 1
        self._began = time.perf_counter()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _is_trained(module):
            return
        if self._has_updated():
            self.end_step()
        if torch.is_autocast_enabled(self._device.type):  # also by a context around the whole run
            self.note_precision(torch.get_autocast_dtype(self._device.type))
            torch.set_autocast_enabled(self._device.type, not self._in_float32)
        backends: Any = torch.backends
        products = (backends.cuda if self._device.type == "cuda" else backends.mkldnn).matmul
        if products.fp32_precision in ("tf32", "bf16"):
            if self.recording.precision is None:
                self.note_precision(torch.float16)
            if self._in_float32:
                for each in (backends.cuda.matmul, backends.mkldnn.matmul):
                    self._active.callback(setattr, each, "fp32_precision", each.fp32_precision)
                with suppress(RuntimeError):  # torch does not read its older setting where a newer one differs
                    self._active.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest")
        with self._recording():
            model = self._added(module)
            self._start()
            call = self._next_call(self._known.numbers[model])
            for name, tensor in [*_named_tensors(args, ""), *_named_tensors(kwargs, "")]:
                self._add("input", name + call, tensor, self._micro_batch + 1)
                if tensor.is_leaf and tensor.requires_grad:
                    self._input_leaves[id(tensor)] = f"input {name}{call}", tensor
        if not self.recording.step_s and self._micro_batch == 0:
            self._began = time.perf_counter()  # loading and the like are no part of the first step

    def _has_updated(self) -> bool:
        """Return whether a step has ended: by optimizers, or in a program that has none by a change of its weights."""
        if self._updated or self._optimizers or not self._sums:
            return bool(self._updated)
        return any(self._sums.get(key, now) != now for key, now in self._sums_of_weights().items())

    def _sums_of_weights(self) -> dict[tuple[int, int], complex]:
        """Return sums by id and by the number of elements that are there: ZeRO-3 has none between two passes.

        Weights that stream are left out: only an optimizer updates those.
        """
        weights = [*(each for _, each in self._named_parameters()), *self._known.leaves]
        weights = [each for each in weights if not hasattr(each, COMES_AND_GOES)]
        parts = [
            (id(weight), part.detach()) for weight in weights if _has_memory(weight) for _, part in parts_of(weight)
        ]
        return {
            (key, part.numel()): part.sum(dtype=torch.complex128 if part.is_complex() else torch.float64).item()
            for key, part in parts
            if part.device.type != "meta"
        }

    def _next_call(self, model: int) -> str:
        """Return the end of the names of a model's inputs."""
        self._num_calls[model] += 1
        calls = self._num_calls[model]
        parts = [f"model {model}"] * (model > 1) + [f"call {calls}"] * (calls > 1)
        return f" ({', '.join(parts)})" if parts else ""

    @contextmanager
    def _without_graph(self, module: nn.Module) -> Iterator[None]:
        """Note a model whose forward pass records no graph, in case that a reentrant checkpoint makes one of it later.

        It has no name before it has gradients: a reference model, which has none, must not be the first one in one run
        and the second in the other.
        """
        if self._depth_of_calls or self._is_without_graph:
            yield
            return
        if _is_trained(module):
            with self._recording():
                self._begin(self._known.whole(module))
        self._is_without_graph = True
        try:
            yield
        finally:
            self._is_without_graph = False

    def _start(self) -> None:
        for model in self._models:
            if id(model) in self._started:
                continue
            self._started.add(id(model))
            self._begin(model)
            names = {id(tensor): name for name, tensor in self._named(model)}
            for tensor, parts in self._begun[model]:
                for suffix, found in parts if id(tensor) in names else ():  # others are frozen since
                    self.recording.tensors[TensorPlace(0, 0, "start", names[id(tensor)] + suffix)] = found

    def _begin(self, model: nn.Module) -> None:
        """Take the fingerprints of a model's weights before its first pass, and perturb them if this run does."""
        if model in self._begun:
            return
        if any(map(is_lazy, model.parameters())):
            raise ValueError(f"{type(model).__name__} has weights without a shape yet: call it once before verify")
        if self._keeper is not None:
            self._keeper.add_model(model)
        self.recording.has_dropout |= any(map(_draws_masks, model.modules()))
        if self._perturbed is not None:
            _perturb(model, getattr(torch, self._perturbed))
        weights, at_home = _weights_of(model), _at_home(model)
        self._begun[model] = [(each, list(_fingerprints(at_home.get(id(each), each)))) for _, each in weights]

    def _before_backward(self, roots: list[Tensor]) -> Mapping[Tensor, Any]:
        if self._has_updated():  # in a program that calls no modules
            self.end_step()
        with self._recording():
            self._micro_batch += 1
            self._num_calls.clear()
            for number, root in enumerate(roots, start=1):
                self._add("loss", "loss" if len(roots) == 1 else f"loss {number}", root, self._micro_batch)
            all_leaves = _leaves(roots)
            self._add_models_of(all_leaves)
            named = set(self._input_leaves).union(*map(_ids, self._models))
            leaves = [leaf for leaf in all_leaves if id(leaf) not in named and _has_memory(leaf)]
            if self._keeper is not None:
                self._keeper.add_leaves([*leaves, *(leaf for _, leaf in self._input_leaves.values())])
            return {leaf: _version(leaf.grad) for leaf in [*leaves, *self._known.leaves]}

    def _add_models_of(self, leaves: Iterable[Tensor]) -> None:
        """Add models of earlier runs whose weights this run reads without calling them."""
        read = set(map(id, leaves))
        for model in list(self._known.numbers):
            if not read.isdisjoint(_ids(model)):
                self.add_model(model)
        self._start()

    def _after_backward(self, versions: Mapping[Tensor, Any]) -> None:
        """Record gradients; `versions` has those of leaves outside of models before this pass.

        A leaf that a reentrant checkpoint reads is in no graph that backward begins with, but its gradient changes.
        """
        with self._recording():
            for model in self._begun:
                if id(model) not in self._started and any(each.grad is not None for each in model.parameters()):
                    self.add_model(model)
            self._start()
            changed = [leaf for leaf, version in versions.items() if version != _version(leaf.grad)]
            self._name_leaves(changed)
            unnamed = [(self._known.leaves[leaf], leaf) for leaf in changed]
            for name, leaf in [*self._named_parameters(), *self._input_leaves.values(), *unnamed]:
                if leaf.grad is not None:
                    self._add("gradient", name, leaf.grad, self._micro_batch)
            self._input_leaves.clear()
            if not self._optimizers:
                self._sums = self._sums_of_weights()

    def _name_leaves(self, leaves: Iterable[Tensor]) -> None:
        """Number leaves; those of earlier passes keep their names."""
        names = self._known.leaves
        taken = {names[leaf] for leaf in leaves if leaf in names}
        free = (name for name in map("leaf {}".format, itertools.count(1)) if name not in taken)
        for leaf in leaves:
            if leaf not in names:
                names[leaf] = next(free)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            if self._keeper is not None:
                self._keeper.add_optimizer(optimizer)
        with self._recording():
            parameters = self._parameters_of(optimizer)
            for group in optimizer.param_groups:
                settings = [(option, Fingerprint.of(value)) for option, value in _named_numbers(group)]
                for name, _ in itertools.islice(parameters, len(group["params"])):
                    for option, found in settings:
                        self.recording.tensors[TensorPlace(self._step, 0, "setting", f"{option} of {name}")] = found

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield trained parameters, those of the last layers first, as backward reaches them."""
        seen: set[int] = set()
        for model in self._models:
            for name, parameter in reversed(list(self._named(model))):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _named(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        number = self._known.numbers[model]
        prefix = f"model {number}: " if number > 1 else ""
        for name, tensor in _weights_of(model):
            yield self._known.names.setdefault(tensor, prefix + name), tensor

    def _parameters_of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of an optimizer, in the order of its groups, by their names in models."""
        number = 1 + self._optimizers.index(optimizer)
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        for position, parameter in enumerate(parameters):
            yield self._known.names.get(parameter, f"parameter {position} of optimizer {number}"), parameter

    def _add(self, phase: Phase, name: str, tensor: Tensor, micro_batch: int) -> None:
        for suffix, found in _fingerprints(tensor):
            self.recording.tensors[TensorPlace(self._step, micro_batch, phase, name + suffix)] = found

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

        with warnings.catch_warnings(), patch.object(warnings, "showwarning", note):
            warnings.filterwarnings("always", f".*{_NOT_DETERMINISTIC}")
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


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return trained parameters, then buffers, by their names without wrappers of modules where these stay unique."""
    found: list[tuple[str, Tensor]] = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    found += list(model.named_buffers())
    bare = {_bare(name): each for name, each in found}
    return list(bare.items()) if len(bare) == len(found) else found


def _at_home(model: nn.Module) -> dict[int, Tensor]:
    """Return, by the ids of parameters, the values of weights that stream, which are away between passes."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(hasattr(each, COMES_AND_GOES) for each in parameters.values()):
        return {}
    return {id(parameters[name]): value for name, value in model.state_dict().items() if name in parameters}


def _bare(name: str) -> str:
    """Return a parameter's name as it is without wrappers of modules; that of data parallelism is the outermost."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


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


def _named_numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers among the options of a group of parameters, such as its learning rate."""
    for option, value in group.items():
        values = {f"{option}[{number}]": each for number, each in enumerate(value)} if isinstance(value, tuple) else {}
        for name, each in (values or {option: value}).items():
            if isinstance(each, int | float | Tensor) and not isinstance(each, bool):
                # A learning rate may be a tensor in float32.
                yield name, torch.as_tensor(each, dtype=torch.float32, device="cpu")


def _leaves(roots: list[Tensor]) -> list[Tensor]:
    """Return the leaves to which a backward pass from `roots` adds gradients, as far as its graph shows them."""
    variables = (getattr(node, "variable", None) for node in graph_nodes(roots, set()))
    found: list[Tensor] = [root for root in roots if root.is_leaf and root.requires_grad]
    return found + [variable for variable in variables if isinstance(variable, Tensor)]


def _version(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return a value that changes when a gradient does."""
    return None if gradient is None else (id(gradient), gradient._version)


def _fingerprints(tensor: Tensor) -> Iterator[tuple[str, Fingerprint]]:
    for suffix, part in parts_of(tensor):
        if part.numel() and part.device.type != "meta":  # others are placeholders of weights held elsewhere
            yield suffix, Fingerprint.of(part)


def _has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor can be read: FSDP2 frees the whole parameters of which it keeps shards."""
    return all(part.untyped_storage().nbytes() for _, part in parts_of(tensor) if part.numel())


def _perturb(model: nn.Module, dtype: torch.dtype) -> None:
    """Change each weight by one unit in its last place of `dtype`, or of its own if that is coarser, at random."""
    generator = torch.Generator("cpu").manual_seed(1)
    for parameter in model.parameters():
        for _, part in parts_of(parameter):
            if (part.is_floating_point() or part.is_complex()) and part.dtype.itemsize > 1:
                eps = max(torch.finfo(dtype).eps, torch.finfo(part.dtype).eps)
                signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8, device="cpu")
                part.mul_(1 + eps * (2 * signs - 1).to(part.device, part.dtype))
