"""Policies of selective checkpointing: operations whose results are kept, the others being recomputed.

Policies are those of torch's `create_selective_checkpoint_contexts`. The two dispatch modes are our own: those of torch
2.11 hold kept results out of saved-tensor hooks' sight, so that no offloader can move them, allow one backward only,
and skip the random numbers that a kept operation drew, so that dropout after it draws other ones.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from hf_memopt.activations.recompute.op_tracer import written_arguments
from hf_memopt.activations.recompute.plain_dispatch import call_as_plain
from hf_memopt.autograd_state import PLAIN_TYPES, VersionGuard, is_plain

Policy = Callable[..., CheckpointPolicy | bool]
_KEEP = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_Position = tuple[Any, int]  # an operation, and how many times it ran before in the region

HEAVY_OPS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm"),
        *("aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2"),
        *("aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"),
        "aten::convolution",
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        "aten::_scaled_dot_product_fused_attention_overrideable",
        *("aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"),
        "flex_attention",
    }
)


def _heavy_ops(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return operation.name().partition(".")[0] in HEAVY_OPS


def _every_second_heavy_op() -> Policy:
    count = itertools.count()
    return lambda *args, **kwargs: _heavy_ops(*args, **kwargs) and next(count) % 2 == 0


# One policy per run of a region, since it may count.
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "heavy_ops": lambda: _heavy_ops,
    "all": lambda: None,
    "alternate": _every_second_heavy_op,
}


class KeepOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The forward pass of a region: notes the outputs that the policy keeps.

    `save` saves them after the region, outside of the dispatch and under the caller's saved-tensor hooks. Until then
    they are not in `kept`, which the graph owns: a graph that owns its own outputs is never freed. Writes are noted by
    storage: `unsafe_chunk`, `_unsafe_view`, `set_` and `.data` give the same memory other version counters.
    """

    supports_higher_order_operators = True

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[_Position, _Kept] = {}
        self._policy = policy
        self._outputs: list[_Output] = []
        self._aliases: dict[int, list[Tensor]] = {}  # by the keys of the outputs' storages
        self._written_at: dict[int, int] = {}  # by any storage's key: how many outputs there were
        self._counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        position = func, self._counts[func]
        self._counts[func] += 1
        answer = self._policy(SelectiveCheckpointContext(is_recompute=False), func, *args, **kwargs)
        keep = answer in _KEEP and may_be_kept(func, args, kwargs)
        if places := written_arguments(func):  # before it runs, because `set_` puts another storage in their place
            written = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
            self._written_at |= dict.fromkeys(_storages_of(written), len(self._outputs))
        result = _call(func, types, args, kwargs)
        if keep and not _storages_of(result) & _storages_of((args, kwargs)):
            self._outputs.append(_Output(position, result))
            self._aliases |= {key: [] for key in self._outputs[-1].storages}
        # The result of a view has the version counter of its argument.
        elif self._outputs and not getattr(func, "is_view", False):
            for tensor in _plain_tensors(result):
                key = tensor.untyped_storage()._cdata
                if key in self._aliases:
                    self._aliases[key].append(tensor)
        return result

    def save(self) -> None:
        """Save the outputs that the region has not changed since; the others are recomputed."""
        for place, output in enumerate(self._outputs):
            was_written = any(self._written_at.get(key, -1) > place for key in output.storages)
            if not was_written and output.has_its_versions():
                aliases = [alias for key in output.storages for alias in self._aliases[key]]
                self.kept[output.position] = _Kept(output.result, aliases)


class ReplayOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, kept: "dict[_Position, _Kept]") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._counts: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        position = func, self._counts[func]
        self._counts[func] += 1
        kept = self._kept.get(position)
        if kept is None or kept.was_modified():
            return _call(func, types, args, kwargs or {})
        return kept.restore()


class _Output:
    def __init__(self, position: _Position, result: Any) -> None:
        self.position, self.result = position, result
        self.storages = _storages_of(result)
        self._versions = [(leaf, leaf._version) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def has_its_versions(self) -> bool:
        return all(tensor._version == version for tensor, version in self._versions)


class _Kept:
    def __init__(self, result: Any, aliases: list[Tensor]) -> None:
        self._saved = tree_map(_Saved, result)
        self._guards = [VersionGuard(tensor) for tensor in (*_plain_tensors(result), *aliases)]

    def was_modified(self) -> bool:
        return any(guard.was_modified() for guard in self._guards)

    def restore(self) -> Any:
        return tree_map(_Saved.restore, self._saved)


class _Saved:
    """Saved by autograd itself, so that hooks apply, in a node that never runs."""

    def __init__(self, value: Any) -> None:
        self._value, self._owner = value, None
        if isinstance(value, Tensor):
            anchor = torch.empty(0, requires_grad=True)
            # The node lives as long as its output.
            self._value, self._owner = None, _SaveTensor.apply(anchor, value.detach())  # type: ignore[no-untyped-call]

    def restore(self) -> Any:
        # A new alias each time: autograd writes the operation's history on it.
        return self._value if self._owner is None else self._owner.grad_fn.saved_tensors[0].detach()


class _SaveTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


def _call(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; those that it calls see the state outside of the mode."""
    plainly = isinstance(func, torch._ops.OpOverload) and not func.is_view and PLAIN_TYPES.issuperset(types)
    return call_as_plain(func, args, kwargs) if plainly else func(*args, **kwargs)


def _plain_tensors(values: Any) -> list[Tensor]:
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_plain(leaf)]


def _storages_of(values: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _plain_tensors(values)}


def may_be_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether recomputation may leave an operation out: it writes and draws nothing, and is more than a view."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None:
        return True
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0
