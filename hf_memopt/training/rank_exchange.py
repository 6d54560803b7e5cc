"""The exchange of gradients and figures among the ranks of an Accelerator, under DDP, FSDP2 and DeepSpeed's engine."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

_STAGES = (2, 3)
_REFUSED = {
    DistributedType.FSDP: "FSDP1 keeps gradients in flat shards; use fsdp_version=2",
    DistributedType.MEGATRON_LM: "it runs forward and backward itself; use accelerator.accumulate",
    DistributedType.XLA: "gradients are exchanged when its graph runs; use accelerator.accumulate",
}
# Engines that hold a part of a window's gradient.
_UNFINISHED: WeakSet[Any] = WeakSet()


def engine_of(accelerator: Accelerator) -> Any:
    """Return the accelerator's DeepSpeed engine, or None without DeepSpeed. ValueError before `prepare`."""
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


def apply_by_engine(engine: Any) -> float:
    """Clip and update; return the gradient's norm before clipping, NaN where DeepSpeed is told to compute none."""
    engine.step()
    _UNFINISHED.discard(engine)
    norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)


def check_distributed_type(accelerator: Accelerator) -> None:
    if accelerator.distributed_type in _REFUSED and not accelerator.is_fsdp2:
        reason = _REFUSED[accelerator.distributed_type]
        raise ValueError(f"distributed_type={accelerator.distributed_type} does not allow exact steps: {reason}")


@contextmanager
def exchange_if(accelerator: Accelerator, models: Sequence[nn.Module], is_due: bool) -> Iterator[None]:
    """Within, backward exchanges gradients if that is due. ZeRO exchanges in each, and needs to know the last."""
    engine = engine_of(accelerator)
    with ExitStack() as stack:
        if engine is not None:
            engine.set_gradient_accumulation_boundary(is_due)
        elif not is_due:
            for model in models:
                stack.enter_context(accelerator.no_sync(model))
        yield


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    """Compute the gradient of the loss as it is; `Accelerator.backward` divides it, and under DeepSpeed applies it."""
    engine = engine_of(accelerator)
    if engine is None:
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)
    else:
        engine.backward(loss, scale_wrt_gas=False)


def backward_to_outputs(accelerator: Accelerator, loss: Tensor) -> None:
    """Compute the gradient by outputs that are cut off from their models, scaled as by `backward`."""
    if engine_of(accelerator) is None:
        backward(accelerator, loss)
    else:
        loss.backward()  # type: ignore[no-untyped-call]


def backward_from_outputs(accelerator: Accelerator, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    engine = engine_of(accelerator)
    if engine is None:
        torch.autograd.backward(outputs, gradients)
        return
    if not outputs:
        raise ValueError("forward_fn: none of its outputs has a gradient, and DeepSpeed's ranks wait for each other's")
    # The engine wants one number, whose gradients by the outputs are these to the bit.
    products = [(output * gradient).sum() for output, gradient in zip(outputs, gradients, strict=True)]
    engine.backward(torch.stack(products).sum(), scale_wrt_gas=False)


def gathers_weights(accelerator: Accelerator) -> bool:
    """Return whether each pass of one rank waits for the others, which then have to run as many."""
    return accelerator.is_fsdp2 or engine_of(accelerator) is not None


def exchanges_each_batch(accelerator: Accelerator) -> bool:
    """Return whether each backward exchanges gradients: FSDP2 then accumulates them in shards."""
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


def drop_gradients(model: nn.Module) -> None:
    """Drop all gradients, those of gathered weights included, which FSDP2 keeps where `zero_grad` does not look."""
    model.zero_grad()
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for sharded in group.fsdp_params if group is not None else ():
            if "unsharded_accumulated_grad" in vars(sharded):  # from torch 2.15 on only groups have any
                sharded.unsharded_accumulated_grad = None
            if hasattr(sharded, "_unsharded_param"):
                sharded._unsharded_param.grad = None


def sum_over_ranks(accelerator: Accelerator, values: list[float]) -> list[float]:
    if accelerator.num_processes == 1:
        return values
    summed: list[float] = accelerator.reduce(
        torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    ).tolist()
    return summed


def max_over_ranks(accelerator: Accelerator, value: int) -> int:
    if accelerator.num_processes == 1:
        return value
    largest = torch.tensor(value, device=accelerator.device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return int(largest)


def check_not_joined(models: Iterable[object]) -> None:
    """Raise ValueError under torch's `Join`, which answers only DDP's own exchanges; all others would wait for ever."""
    if any(ddp._join_config.enable for ddp in _ddp_among(models)):
        raise ValueError(
            "model: torch's Join is on, and answers for a rank without data only what DDP itself exchanges. Leave Join "
            "out, and give that rank windows whose micro-batches weigh 0, or in GradientCache have no samples. Join "
            "stays on after its block: Join([model], enable=False) turns it off"
        )


def check_first_window(accelerator: Accelerator, models: Iterable[object], num_micro_batches: int) -> None:
    """Raise ValueError, on all ranks together, where a static graph's first backward would end in torch's assertion."""
    if exchanges_each_batch(accelerator) or not _awaits_first_exchange(models):
        return
    most = max_over_ranks(accelerator, num_micro_batches)
    if most > 1:
        raise ValueError(
            f"static_graph=True: DDP has to exchange gradients in its first backward, and this first window has {most} "
            "micro-batches, of which the last one exchanges them. Begin with a window of one micro-batch on each rank, "
            "or exchange in all of them: GradientAccumulationPlugin(sync_each_batch=True)"
        )


def check_exchange_after_backward(models: Iterable[object]) -> None:
    """Raise ValueError if a static graph's first backward is to come, which has to exchange gradients within."""
    if _awaits_first_exchange(models):
        raise ValueError(
            "static_graph=True: DDP has to exchange gradients in its first backward, and no rank may exchange while "
            "another one can run out of memory. Make the first step with train_step, on one micro-batch on each rank"
        )


def _awaits_first_exchange(models: Iterable[object]) -> bool:
    return any(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued for ddp in _ddp_among(models))


def _ddp_among(models: Iterable[object]) -> Iterator[DistributedDataParallel]:
    for model in models:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, DistributedDataParallel):
                yield module
