"""Checks for limits of DDP: torch's `Join`, and a static graph before its first exchange."""

from collections.abc import Iterable, Iterator

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.training.accumulation.rank_exchange import exchanges_each_batch, max_over_ranks


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
