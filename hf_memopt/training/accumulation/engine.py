"""A window of micro-batches in DeepSpeed's engine, which exchanges, clips and applies gradients itself."""

import math
from typing import Any
from weakref import WeakSet

from accelerate import Accelerator
from accelerate.utils import DistributedType

_STAGES = (2, 3)
# Engines that hold a part of a window's gradient.
_UNFINISHED: WeakSet[Any] = WeakSet()


def engine_of(accelerator: Accelerator) -> Any:
    """Return the accelerator's DeepSpeed engine; None without DeepSpeed. ValueError before `prepare`."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return None
    if accelerator.deepspeed_engine_wrapped is None:
        raise ValueError("model: the accelerator uses DeepSpeed and has prepared no model; pass it through prepare")
    return accelerator.deepspeed_engine_wrapped.engine


def check_engine(engine: Any, max_grad_norm: float | None) -> None:
    """Raise ValueError if a step would not be exact, or the window before has not ended."""
    if engine in _UNFINISHED:
        raise ValueError(
            "the window before this one ended in an error, and DeepSpeed holds a part of its gradient; make the "
            "accelerator and its model anew, from a checkpoint"
        )
    if engine.zero_optimization_stage() not in _STAGES:
        raise ValueError(
            f"zero_optimization.stage={engine.zero_optimization_stage()} does not allow exact steps; use 2 or 3, or DDP"
        )
    clipped_to = engine.gradient_clipping() or None
    if max_grad_norm != clipped_to:
        raise ValueError(
            f"max_grad_norm={max_grad_norm}: DeepSpeed clips by itself, with gradient_clipping={clipped_to}; give both "
            "the same value"
        )


def begin_window(engine: Any) -> None:
    """Note that gradients are collected, which DeepSpeed cannot drop."""
    _UNFINISHED.add(engine)


def apply(engine: Any) -> float:
    """Clip and update; return the gradient's norm before clipping, NaN where DeepSpeed is told to compute none."""
    engine.step()
    _UNFINISHED.discard(engine)
    norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)
