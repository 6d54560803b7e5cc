"""A window of micro-batches: how a batch is split, and the weight of each part in the gradient of all, on all ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt.ranges import COUNT
from hf_memopt.training.rank_exchange import gathers_weights, max_over_ranks, sum_over_ranks

WeightFn = Callable[[Any], float | Tensor]
Weighted = Sequence[tuple[Any, float]]  # micro-batches, and the factors of their losses in the loss of the step

_IGNORED = -100  # the label that torch's and transformers' losses leave out
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")  # transformers' loss types that predict the next token


def split_batch(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Yield the batch's samples in their order, `micro_batch_size` at a time; the last part may be smaller.

    Tensors are cut along their first dimension, as views, and lists of anything but containers by item, wherever they
    are in tuples, lists and mappings. Tensors `()`, strings, numbers and None go into each part as they are.

    Raises:
        ValueError: no tensor with samples, different numbers of them, or `micro_batch_size` is no count.
    """
    COUNT.check("micro_batch_size", micro_batch_size)
    for start in range(0, num_samples(batch), micro_batch_size):
        yield take(batch, slice(start, start + micro_batch_size))


def num_samples(batch: Any) -> int:
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        found = f"with {sorted(sizes)} samples" if sizes else "without samples"
        raise ValueError(f"batch: tensors and lists {found}; give all of them the same first dimension")
    return sizes.pop()


def take(batch: Any, rows: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim else batch
    if _has_samples(batch):
        return batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows]
    if isinstance(batch, Mapping):
        return type(batch)({key: take(each, rows) for key, each in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        parts = [take(each, rows) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _sizes(batch: Any) -> Iterator[int]:
    if _has_samples(batch):
        yield len(batch)
    elif isinstance(batch, Mapping | list | tuple):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(each)


def _has_samples(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(each, Tensor | Mapping | list | tuple) for each in value)
    return isinstance(value, Tensor) and value.ndim > 0


def normalized_weights(
    accelerator: Accelerator, model: nn.Module, micro_batches: Sequence[Any], weight_fn: WeightFn | None
) -> Weighted:
    weights, complaint = _weights(micro_batches, weight_fn or default_weight(accelerator.unwrap_model(model)))
    total, num_complaints = sum_over_ranks(accelerator, [sum(weights), complaint is not None])
    if num_complaints:
        raise ValueError(complaint or "micro_batches or weight_fn: invalid on another rank, whose error says why")
    if total == 0:
        raise ValueError("weight_fn: all weights are 0 on all ranks; leave such windows out")
    weighted = [(each, weight / total) for each, weight in zip(micro_batches, weights, strict=True)]
    # Without tokens a mean loss is 0 / 0, and NaN times 0 is NaN, so such micro-batches do not run. A rank without
    # others runs one of them all the same, because the other ranks wait for its gradients.
    weighted = [each for each in weighted if each[1] > 0] or weighted[-1:]
    if gathers_weights(accelerator):
        # Each pass needs the shards of all ranks. Those with fewer repeat their last one for nothing.
        num_missing = max_over_ranks(accelerator, len(weighted)) - len(weighted)
        weighted += [(weighted[-1][0], 0.0)] * num_missing
    return weighted


def default_weight(model: nn.Module) -> WeightFn:
    """Return the default weight of a micro-batch: its labels that are not ignored, or else its samples.

    Labels are integers in `labels` or `shift_labels` of a mapping, of which -100 is ignored. A transformers model
    (unwrapped) that predicts the next token makes no loss of each row's first label, which then does not count.
    """
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    shifts = getattr(model, "loss_type", None) in _SHIFTED and not is_encoder_decoder

    def weigh(micro_batch: Any) -> float | Tensor:
        labels = _labels(micro_batch, "shift_labels")
        if labels is None:
            labels = _labels(micro_batch, "labels")
            if labels is not None and shifts:
                labels = labels[..., 1:]
        return num_samples(micro_batch) if labels is None else labels.ne(_IGNORED).sum()

    return weigh


def _labels(micro_batch: Any, name: str) -> Tensor | None:
    labels = micro_batch.get(name) if isinstance(micro_batch, Mapping) else None
    is_counted = isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point()
    return labels if is_counted else None


def _weights(micro_batches: Sequence[Any], weight_fn: WeightFn) -> tuple[list[float], str | None]:
    if not micro_batches:
        return [], "micro_batches is empty on this rank; every rank needs one, so that all can exchange gradients"
    weights: list[float] = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        try:
            weight = float(weight_fn(micro_batch))
        except ValueError as error:
            return weights, f"micro-batch {number}: {error}; or give a weight_fn"
        if not 0 <= weight < math.inf:
            return weights, f"weight_fn returned {weight} for micro-batch {number}; weights are finite and not negative"
        weights.append(weight)
    return weights, None
