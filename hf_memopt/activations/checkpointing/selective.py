"""Selective activation checkpointing: backward recomputes cheap operations and keeps the results of heavy ones."""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hf_memopt.activations.checkpointing.save_policies import POLICIES, KeepOutputs, Policy, ReplayOutputs

logger = logging.getLogger(__name__)


class SelectiveCheckpoint:
    """Runs a module or a function so that backward recomputes it, all but the results that `policy` keeps.

    `SelectiveCheckpoint("heavy_ops")(module, *args, **kwargs)` gives the result and bitwise the gradients of
    `module(*args, **kwargs)`: dropout draws the same numbers again. Without grad mode it is a plain call. Kept results
    and tensors in the arguments pass through the saved-tensor hooks around the call, so an `ActivationOffloader` moves
    them. They stay until the region's backward is over, or serve every backward with `retain_graph` or `create_graph`.
    Cost: one Python dispatch per operation, in forward and in recomputation; the region is never compiled.

    Args:
        policy: "heavy_ops" keeps the outputs of matrix products, attention and convolutions; "alternate" those of every
            second of them, from the first; "all" recomputes everything. Or a function as torch's
            `create_selective_checkpoint_contexts` takes it, `(context, operation, *args, **kwargs)` to a
            `CheckpointPolicy` or bool, asked in the forward pass only. Always recomputed: views, operations that write
            in place or draw random numbers, and outputs modified in place, in the region or after it (after it, writes
            that autograd does not count go unnoticed: `.data`, NumPy).

    Raises:
        ValueError: unknown policy; or, when called, a module whose forward writes a buffer, which backward would write
            once more. Of functions only bound methods of a module can be checked.
    """

    def __init__(self, policy: str | Policy = "heavy_ops") -> None:
        if not callable(policy) and policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; use one of {sorted(POLICIES)} or a policy function")
        self.policy = policy

    # As torch.compiler.disable, except that the compiler, whose import takes seconds, is imported at the first call.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if not isinstance(owner, nn.Module):
            return self._run(function, args, kwargs)
        with _buffers_unchanged(owner):
            return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Flat: torch saves only the tensors among the positional arguments, and the random state of their devices.
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return function(*args, **kwargs)

        policy = self.policy if callable(self.policy) else POLICIES[self.policy]()
        if policy is None:
            return checkpoint(run, *leaves, use_reentrant=False)
        # Both modes share the dictionary of kept results, which is empty until `save`.
        keeping = KeepOutputs(policy)
        contexts = keeping, ReplayOutputs(keeping.kept)
        output = checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        keeping.save()
        return output


@contextmanager
def _buffers_unchanged(module: nn.Module) -> Iterator[None]:
    _refuse_known_writers(module)
    before = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    yield
    # In-place writes raise the version; an assignment such as `self.mean = ...` replaces the tensor.
    for (name, buffer, version), now in zip(before, module.buffers(), strict=True):
        if buffer is not now or buffer._version != version:
            raise _writes_buffer(module, name.rpartition(".")[0], name.rpartition(".")[2])


def _refuse_known_writers(module: nn.Module) -> None:
    """Before anything is written, and for normalisation, whose kernels do not count as in-place modification."""
    for name, child in module.named_modules():
        for buffer in _written_buffers(child) if child.training else ():
            raise _writes_buffer(module, name, buffer)


def _written_buffers(module: nn.Module) -> Iterator[str]:
    if isinstance(module, _NormBase) and module.running_mean is not None:
        yield "running_mean"
    if isinstance(module, _SpectralNorm):
        yield "_u"
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield f"{hook.name}_u"


def _writes_buffer(root: nn.Module, name: str, buffer: str) -> ValueError:
    where = f"{name!r} ({type(root.get_submodule(name)).__name__}) in " if name else ""
    return ValueError(
        f"{where}{type(root).__name__} cannot be checkpointed: its forward writes the buffer {buffer!r}, and "
        "recomputation would write it once more; do not checkpoint it, put it in eval mode, or replace "
        "it (BatchNorm by GroupNorm)"
    )


def apply_selective_checkpointing(
    model: nn.Module, policy: str | Policy = "heavy_ops", modules: Iterable[type[nn.Module] | str] | None = None
) -> "CheckpointedModules":
    """Checkpoint a model's repeated blocks; returns a handle whose `remove()` undoes it.

    In training mode with gradients each block runs under `SelectiveCheckpoint(policy)`, otherwise plainly. State dict
    and class stay; copies and pickles are checkpointed as well (pickles need a policy by name, or one that can be
    pickled). As in transformers, blocks get no key-value cache, which recomputation would fill twice.
    `nn.DataParallel`, which copies modules shallowly, is not supported.

    Args:
        model: changed in place.
        policy: as for `SelectiveCheckpoint`.
        modules: the modules to checkpoint, by class, class name or name in the model; of nested ones the outermost.
            None: transformers' `GradientCheckpointingLayer`s, or else the members of a `ModuleList` or `Sequential` of
            two or more modules of one class, for the class that has most parameters there.

    Raises:
        ValueError: no such module; one with gradient checkpointing or a replaced `forward` already; one whose forward
            writes a buffer in its present mode.
    """
    checkpointing = SelectiveCheckpoint(policy)
    for name, module in model.named_modules():
        _refuse_gradient_checkpointing(module, name)
    found = _outermost(_blocks(model) if modules is None else _chosen(model, modules))
    for name, module in found.items():
        if "forward" in vars(module):
            raise ValueError(
                f"modules: {name!r} runs {vars(module)['forward']!r} instead of its own forward; apply selective "
                "checkpointing first, and once"
            )
        _refuse_known_writers(module)
    return CheckpointedModules(found, checkpointing)


class CheckpointedModules:
    def __init__(self, modules: dict[str, nn.Module], checkpointing: SelectiveCheckpoint) -> None:
        self.names = tuple(modules)
        self._modules = modules
        for module in modules.values():
            # Not a wrapper (other state dict keys), a class (no pickles) or hooks (no second run of the forward).
            module.forward = CheckpointedForward(module, checkpointing)

    def remove(self) -> None:
        """Give the modules their own forward again; a RuntimeError if something else has replaced it since."""
        for name, module in self._modules.items():
            if not isinstance(vars(module).get("forward"), CheckpointedForward):
                raise RuntimeError(f"the forward of {name!r} has been replaced since; undo that first")
        for module in self._modules.values():
            del module.forward
        self._modules = {}


class CheckpointedForward:
    def __init__(self, module: nn.Module, checkpointing: SelectiveCheckpoint) -> None:
        self._module = module
        self._checkpointing = checkpointing
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._names = tuple(each.name for each in parameters if each.kind in by_position)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward = MethodType(type(module).forward, module)
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        _refuse_gradient_checkpointing(module, type(module).__name__)
        args, kwargs = _without_cache(self._names, args, kwargs)
        return self._checkpointing(forward, *args, **kwargs)


_CACHES: dict[str, Any] = {"use_cache": False, "past_key_value": None, "past_key_values": None, "layer_past": None}


def _without_cache(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace caches passed by name or, as in GPT-2's blocks, by position."""
    given = dict(zip(names, args, strict=False)) | kwargs
    caches = {name: nothing for name, nothing in _CACHES.items() if given.get(name, nothing) is not nothing}
    if caches:
        _tell_once(f"checkpointed blocks run without a key-value cache: {', '.join(caches)} not passed on")
    by_position = tuple(caches.get(name, value) for name, value in zip(names, args, strict=False))
    by_name = {name: nothing for name, nothing in caches.items() if name not in names[: len(args)]}
    return by_position + args[len(by_position) :], kwargs | by_name


@cache
def _tell_once(message: str) -> None:
    logger.info(message)


def _refuse_gradient_checkpointing(module: nn.Module, name: str) -> None:
    if getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"gradient checkpointing is enabled in {name or type(module).__name__!r}, so that its blocks would be "
            "recomputed twice; call model.gradient_checkpointing_disable() first"
        )


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    layers = {
        name: module
        for name, module in model.named_modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    }
    groups = [layers] if layers else _repeated(model)
    if not groups:
        raise ValueError(
            f"modules=None: {type(model).__name__} has no repeated blocks; looked for transformers' "
            "GradientCheckpointingLayer and for a ModuleList or Sequential of two or more modules of one class; say "
            "which modules to checkpoint, by class or name"
        )
    return max(groups, key=lambda group: sum(p.numel() for block in group.values() for p in block.parameters()))


def _repeated(model: nn.Module) -> list[dict[str, nn.Module]]:
    groups: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    blocks: dict[str, nn.Module] = {}
    for name, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential) and not _is_inside(name, blocks):
            children = {f"{name}.{child}".lstrip("."): module for child, module in container.named_children()}
            classes = {type(child) for child in children.values()}
            if len(children) > 1 and len(classes) == 1 and not classes & {nn.ModuleList, nn.ModuleDict}:
                groups[classes.pop()] |= children
                blocks |= children
    return list(groups.values())


def _chosen(model: nn.Module, modules: Iterable[type[nn.Module] | str]) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for wanted in (modules,) if isinstance(modules, str | type) else modules:
        matches = {name: module for name, module in named.items() if _matches(name, module, wanted)}
        if not matches:
            raise ValueError(f"modules: {wanted!r} is neither a class nor a name of a module in {type(model).__name__}")
        found |= matches
    return found


def _matches(name: str, module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        return wanted in (name, type(module).__name__)
    return isinstance(module, wanted)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if not _is_inside(name, modules.keys() - {name})}


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(not outer or f"{name}.".startswith(f"{outer}.") for outer in modules)
