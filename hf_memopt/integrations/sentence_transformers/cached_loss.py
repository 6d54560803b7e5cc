"""Losses of sentence-transformers over large batches, with the activations of a few sentences at a time."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import (
    _create_minibatch,
    _minibatch_ranges,
    has_static_embedding_input,
    uses_gradient_cache,
)
from torch import Tensor, nn

from hf_memopt.ranges import COUNT
from hf_memopt.training.repeatable import CachedForward

MicroBatch = tuple[dict[str, Any], int, int]  # the features of a column, and the rows


class CachedLoss(nn.Module):
    """Any loss over sentence embeddings, at the memory of one micro-batch: the same loss and gradients, to rounding.

    The batch is embedded without gradients, in micro-batches; the wrapped loss sees all embeddings; and `backward`
    embeds each micro-batch again, with the same random numbers (`GradientCache`). sentence-transformers' own Cached
    losses do this for a few formulas; this does it for the others: triplets of the batch, CoSENT, AnglE, cosine
    similarity, distillation.

    Args:
        loss: of sentence-transformers, with `compute_loss_from_embeddings(embeddings, labels)`. Its options hold,
            `gather_across_devices` among them.
        micro_batch_size: sentences of one column that are embedded at a time.

    Raises:
        ValueError: `loss` computes from something else, caches already or belongs to a model of static embeddings,
            whose inputs cannot be split; or `micro_batch_size` is less than 1.

    Costs one more forward pass, and the wrapped loss's own memory for the whole batch: ranking losses hold batch ×
    batch numbers, their Cached relatives a few rows. Dropout's masks are those of micro-batches, not of one large
    forward pass.

    Example:
        >>> loss = CachedLoss(CoSENTLoss(model), micro_batch_size=32)
        >>> SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset, loss=loss).train()
    """

    # For wrappers of sentence-transformers that cannot take losses which run the model during backward.
    uses_gradient_cache = True

    def __init__(self, loss: nn.Module, micro_batch_size: int = 32) -> None:
        super().__init__()
        COUNT.check("micro_batch_size", micro_batch_size)
        if uses_gradient_cache(loss):
            raise ValueError(f"loss={type(loss).__name__} caches gradients already; use it as it is")
        if not _is_of_embeddings(loss):
            raise ValueError(
                f"loss={type(loss).__name__} has no compute_loss_from_embeddings(embeddings, labels): it needs more "
                "than these, and cannot be computed from micro-batches; use it as it is"
            )
        self.loss: Any = loss
        if has_static_embedding_input(self.model):
            raise ValueError(
                f"loss={type(loss).__name__} belongs to a model of static embeddings, whose inputs cannot be split; "
                "use it as it is: such a model keeps hardly any activations"
            )
        self.micro_batch_size = micro_batch_size

    @property
    def model(self) -> Any:
        """The wrapped loss's model, which the trainer replaces by the prepared one."""
        return getattr(self.loss, "model", None) or self.loss.sentence_embedder  # of losses on triplets of a batch

    def forward(self, sentence_features: Sequence[dict[str, Any]], labels: Tensor | None) -> Any:
        """Return the wrapped loss for the columns' features, each tokenized, and for its `labels`."""
        columns = list(sentence_features)
        ranges = [_minibatch_ranges(column, self.micro_batch_size) for column in columns]
        micro_batches = [
            (column, begin, end) for column, of_column in zip(columns, ranges, strict=True) for begin, end in of_column
        ]
        num_rows = [of_column[-1][1] for of_column in ranges]

        def of_all(embeddings: Tensor) -> Any:
            return self.loss.compute_loss_from_embeddings(list(torch.split(embeddings, num_rows)), labels)

        no_sync = getattr(self.model, "no_sync", nullcontext)  # of DDP

        def around(is_last: bool) -> AbstractContextManager[Any]:
            return nullcontext() if is_last else no_sync()

        device = next(value.device for value in columns[0].values() if isinstance(value, Tensor))
        return CachedForward(self._embed, micro_batches, device, around).loss(of_all)

    def get_config_dict(self) -> dict[str, Any]:
        """Return this loss's entries in the model card."""
        config = self.loss.get_config_dict() if hasattr(self.loss, "get_config_dict") else {}
        return {"loss": type(self.loss).__name__, **config, "micro_batch_size": self.micro_batch_size}

    def _embed(self, micro_batch: MicroBatch) -> Tensor:
        # Made anew each time: modules write into the features that they are given. Padding is cut to the longest.
        embedding: Tensor = self.model(_create_minibatch(*micro_batch))["sentence_embedding"]
        return embedding


def _is_of_embeddings(loss: nn.Module) -> bool:
    function = getattr(loss, "compute_loss_from_embeddings", None)
    return function is not None and list(inspect.signature(function).parameters) == ["embeddings", "labels"]
