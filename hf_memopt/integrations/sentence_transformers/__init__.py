"""Losses of sentence-transformers over large batches, and a script that trains an embedding model with them."""

from hf_memopt.integrations.sentence_transformers.cached_loss import CachedLoss

__all__ = ["CachedLoss"]
