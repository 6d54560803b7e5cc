"""What selective checkpointing keeps and what it recomputes, operation by operation.

Policies are those of torch's `create_selective_checkpoint_contexts`. The two dispatch modes are our own, because those
of torch 2.11 hold what is kept where saved-tensor hooks do not see it, so that no offloader can move it, allow one
backward only, and skip the random numbers that a kept operation drew, so that dropout after it draws other ones.
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

Policy = Callable[..., CheckpointPolicy | bool]
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


# One policy per run of a region, since it may count; None keeps nothing.
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "heavy_ops": lambda: _heavy_ops,
    "all": lambda: None,
    "alternate": _every_second_heavy_op,
}


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The forward pass of a region: notes the outputs that the policy keeps.

    They are saved when the region is over, by `save`, outside of the dispatch and under the caller's saved-tensor
    hooks. Until then they are not in `kept`, which the graph owns: a graph that owns its own outputs is never freed.
    """

    supports_higher_order_operators = True

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[_Position, Any] = {}
        self._policy = policy
        self._outputs: list[tuple[_Position, Any]] = []
        self._counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        position = func, self._counts[func]
        self._counts[func] += 1
        keep = self._keeps(func, args, kwargs) and may_be_kept(func, args, kwargs)
        output = func(*args, **kwargs)
        if keep:
            self._outputs.append((position, tree_map(_Output, output)))
        return output

    def save(self) -> None:
        for position, outputs in self._outputs:
            # What the region went on to modify in place is recomputed.
            if all(output.is_unchanged() for output in tree_leaves(outputs)):
                self.kept[position] = tree_map(_Saved, outputs)

    def _keeps(self, func: Any, args: Any, kwargs: Any) -> bool:
        answer = self._policy(SelectiveCheckpointContext(is_recompute=False), func, *args, **kwargs)
        return answer in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The recomputation of a region: runs what was not kept."""

    supports_higher_order_operators = True

    def __init__(self, kept: dict[_Position, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._counts: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = func, self._counts[func]
        self._counts[func] += 1
        if position in self._kept:
            return tree_map(lambda leaf: leaf.restore(), self._kept[position])
        return func(*args, **(kwargs or {}))


class _Output:
    """One output of an operation, as of now."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._version = value._version if isinstance(value, Tensor) else None

    def is_unchanged(self) -> bool:
        return self._version is None or self.value._version == self._version


class _Saved:
    """Saved by autograd itself, in a node that never runs: hooks apply, and in-place modification is noticed."""

    def __init__(self, output: _Output) -> None:
        self._value, self._owner = output.value, None
        if isinstance(output.value, Tensor):
            anchor = torch.empty(0, requires_grad=True)
            # The node lives as long as its output.
            self._value, self._owner = None, _SaveTensor.apply(anchor, output.value.detach())  # type: ignore[no-untyped-call]

    def restore(self) -> Any:
        # Another alias each time: autograd makes it the operation's output and writes its history on it.
        return self._value if self._owner is None else self._owner.grad_fn.saved_tensors[0].detach()


class _SaveTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


def may_be_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether recomputation may leave an operation out: it writes nothing, draws nothing, and is more than a view."""
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
