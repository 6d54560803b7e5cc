"""Embedding models: a query is told from the passages of all others, as sentence-transformers trains them.

Source: `embed_columns`, `Pooling` and `MultipleNegativesRankingLoss` of sentence-transformers 6.2, and `CachedLoss` of
this library around that loss.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_memopt.planning.models.model_batches import Batch, Sample
from hf_memopt.training.repeatable import CachedForward

# Of cosines, in the softmax.
_SCALE = 20.0


def column_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Queries, and below them the passages, column by column: `((1 + passages) * num_samples, seq_len)`.

    The labels tell the number of queries.
    """
    tokens = torch.zeros((1 + sample.passages) * num_samples, sample.seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": torch.zeros(num_samples, dtype=torch.long)}


def embeds_texts(config: Any) -> bool:
    """Return whether a configuration is of an encoder or of a decoder of text alone."""
    parts = " ".join(getattr(config, "sub_configs", ()))
    if getattr(config, "is_encoder_decoder", False) or any(kind in parts for kind in ("text", "vision", "audio")):
        return False
    return _is_encoder(config) or type(config) in AutoModelForCausalLM._model_mapping


def describe_columns(config: Any, sample: Sample) -> str:
    passages = "a passage" if sample.passages == 1 else f"{sample.passages} passages"
    pooled = "the mean of the states" if _is_encoder(config) else "the last token's state"
    return f"on a query and {passages} of {sample.seq_len} tokens each, embedded by {pooled}"


def ranking_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the loss of one forward pass of queries, and one of their passages."""
    count = len(inputs["labels"])
    queries, passages = (_embed(model, _rows(inputs, rows)) for rows in (slice(count), slice(count, None)))
    return _of_embeddings(queries, passages)


def cached_ranking_loss(model: Any, inputs: dict[str, Any], num_passes: int, num_simulated: int) -> Tensor:
    """Return the loss of all texts of an update, with the activations of a column's part at a time, as in `inputs`.

    Of the `num_passes` parts of a column `num_simulated` run; embeddings of the others are copies.
    """
    count = len(inputs["labels"])
    columns = [_rows(inputs, slice(first, first + count)) for first in range(0, len(inputs["input_ids"]), count)]
    parts, passages = [column for column in columns for _ in range(num_simulated)], len(columns) - 1
    num_queries, copies = num_simulated * count, -(-num_passes // num_simulated)

    def of_all(embeddings: Tensor) -> Tensor:
        sides = (
            (embeddings[:num_queries], num_passes * count),
            (embeddings[num_queries:], num_passes * count * passages),
        )
        return _of_embeddings(*(some.repeat(copies, 1)[:number] for some, number in sides))

    return CachedForward(lambda part: _embed(model, part), parts, inputs["input_ids"].device).loss(of_all)


def _is_encoder(config: Any) -> bool:
    return type(config) in AutoModelForMaskedLM._model_mapping


def _rows(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] for name, value in inputs.items() if name != "labels"}


def _embed(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return embeddings `(texts, width)`."""
    states: Tensor = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    if _is_encoder(getattr(model, "module", model).config):
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean: Tensor = (states * weights).sum(dim=1, dtype=torch.float32) / weights.sum(dim=1, dtype=torch.float32)
        return mean.to(states.dtype)
    last: Tensor = states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1]
    return last


def _of_embeddings(queries: Tensor, passages: Tensor) -> Tensor:
    cosines = nn.functional.normalize(queries, dim=1) @ nn.functional.normalize(passages, dim=1).T
    scores, rows = cosines * _SCALE, torch.arange(len(queries), device=queries.device)
    return -(scores[rows, rows] - torch.logsumexp(scores, dim=1)).mean()
