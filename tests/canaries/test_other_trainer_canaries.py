"""Canaries of the callbacks for Lightning, and of the cached loss of sentence-transformers."""

import inspect

import torch
from late_imports import LateModule

strategies = LateModule("lightning.pytorch.strategies")
loops = LateModule("lightning.pytorch.loops.optimization.automatic")
connectors = LateModule("lightning.pytorch.trainer.connectors.logger_connector.logger_connector")
embedding_losses = LateModule("sentence_transformers.sentence_transformer.losses")
gradcache = LateModule("sentence_transformers.base.losses.gradcache")


def test_lightning_asks_the_strategy_for_forward_and_loss_alone() -> None:
    assert '_call_strategy_hook(trainer, "training_step"' in inspect.getsource(
        loops._AutomaticOptimization._training_step
    )
    assert "backward" not in inspect.getsource(strategies.Strategy.training_step)
    assert isinstance(connectors._LoggerConnector.should_update_logs, property)


def test_sentence_transformers_cuts_micro_batches_and_their_padding() -> None:
    features = {
        "input_ids": torch.ones(3, 4),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]),
    }
    assert gradcache._minibatch_ranges(features, 2) == [(0, 2), (2, 3)]
    assert gradcache._create_minibatch(features, 2, 3)["input_ids"].shape == (1, 2)


def test_losses_of_sentence_transformers_say_that_they_run_the_model_in_backward() -> None:
    for name in ("CachedMultipleNegativesRankingLoss", "CachedGISTEmbedLoss"):
        assert getattr(embedding_losses, name).uses_gradient_cache
