"""CachedLoss in SentenceTransformerTrainer: the uncached loss's weights from micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal
from late_imports import LateModule
from offload_trainers import everything
from torch import Tensor

callbacks = LateModule("hf_memopt.callbacks")
sentences = LateModule("sentence_toys")
cached = LateModule("hf_memopt.integrations.sentence_transformers")
losses = LateModule("sentence_transformers.sentence_transformer.losses")

PAIRS = ("MultipleNegativesRankingLoss", "CoSENTLoss")


def trained(folder: Path, name: str, micro_batch_size: int | None, *, dropout: float = 0.0, **settings: Any) -> Any:
    model = sentences.make_model(folder, dropout).double()
    loss = getattr(losses, name)(model)
    if micro_batch_size is not None:
        loss = cached.CachedLoss(loss, micro_batch_size)
    return sentences.train(folder, model, loss, sentences.rows(name in PAIRS[1:]), **settings)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.sweep(share=0.4)
def test_weights_are_those_of_the_uncached_loss(tmp_path: Path, name: str, micro_batch_size: int) -> None:
    """Compare in float64 up to the order of sums, with sentences of several lengths and a small last batch."""
    plain = trained(tmp_path, name, None, gradient_accumulation_steps=2)
    ours = trained(tmp_path, name, micro_batch_size, gradient_accumulation_steps=2)
    before = sentences.make_model(tmp_path, 0.0).double().state_dict()
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=1e-9, atol=1e-11)
    assert any(not torch.equal(before[key], value) for key, value in plain.model.state_dict().items())
    ours_logged, logged = (
        [entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, plain)
    )
    assert ours_logged == pytest.approx(logged, rel=1e-6)
    evaluated, expected = (each.evaluate()["eval_loss"] for each in (ours, plain))
    assert evaluated == pytest.approx(expected, rel=1e-9)


def test_triplets_of_a_batch_by_labels(tmp_path: Path) -> None:
    model = sentences.make_model(tmp_path, 0.0).double()
    (features,), labels = sentences.batch(model, 1), torch.arange(8) % 3
    plain = losses.BatchHardTripletLoss(model)
    plain([features], labels).backward()
    want = gradient(model)
    loss = cached.CachedLoss(plain, 2)
    loss([features], labels).backward()
    torch.testing.assert_close(gradient(model), want, rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_their_cached_loss_dropout_included(tmp_path: Path) -> None:
    """Compare with dropout: both losses draw the same masks for the same micro-batches."""
    model = sentences.make_model(tmp_path, 0.3).double().train()
    found = []
    for make in (
        lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
        lambda: cached.CachedLoss(losses.MultipleNegativesRankingLoss(model), 3),
    ):
        torch.manual_seed(5)
        loss = make()(sentences.batch(model, 2), None)
        loss.backward()
        found.append((loss.item(), gradient(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-12)


CACHED: dict[str, Any] = {
    "CachedMultipleNegativesRankingLoss": {"mini_batch_size": 4},
    "CachedMultipleNegativesSymmetricRankingLoss": {"mini_batch_size": 4},
    "CachedGISTEmbedLoss": {"mini_batch_size": 4},
    "MegaBatchMarginLoss": {"mini_batch_size": 4},
}


# The loss itself, outside of the model, has at most 74 KB, or 54 KB with a plan.
LEAST_MOVED = {"all": 800_000, "auto": 300_000, "inputs": 40_000}


def losses_that_run_forward_in_backward(folder: Path, model: Any) -> dict[str, Any]:
    guide = sentences.make_model(folder, 0.0)
    made = {
        name: getattr(losses, name)(model, **({"guide": guide} if "GIST" in name else {}), **options)
        for name, options in CACHED.items()
    }
    ours = cached.CachedLoss(losses.MultipleNegativesRankingLoss(model), 4)
    matryoshka = losses.MatryoshkaLoss(model, made["CachedMultipleNegativesRankingLoss"], [16, 8])
    return made | {"CachedLoss": ours, "MatryoshkaLoss": matryoshka}


@pytest.mark.filterwarnings("ignore:.*CachedMultipleNegativesSymmetricRankingLoss")
@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("mode", ["all", "auto", "inputs"])
@pytest.mark.parametrize("name", [*CACHED, "CachedLoss", "MatryoshkaLoss"])
def test_the_forward_passes_in_backward_are_offloaded(name: str, mode: str, tmp_path: Path) -> None:
    weights: list[list[Tensor]] = []
    for offloader in (None, everything(AdversarialCopier("late"), mode=mode)):
        model = sentences.make_model(tmp_path, 0.3)
        loss = losses_that_run_forward_in_backward(tmp_path, model)[name]
        trainer = sentences.make_trainer(
            tmp_path, model, loss, sentences.rows(False), gradient_checkpointing=mode == "inputs"
        )
        if offloader is not None:
            callbacks.attach(trainer, offloader=offloader, memory=False)
        trainer.train()
        weights.append(list(trainer.model.parameters()))
    assert equal(*weights)
    assert offloader.stats.bytes_moved > LEAST_MOVED[mode]


def test_what_cannot_be_cached_is_refused(tmp_path: Path) -> None:
    model = sentences.make_model(tmp_path, 0.0)
    with pytest.raises(ValueError, match="CachedMultipleNegativesRankingLoss caches gradients already"):
        cached.CachedLoss(losses.CachedMultipleNegativesRankingLoss(model))
    for name in ("EmbedDistillLoss", "SoftmaxLoss"):
        options = {"SoftmaxLoss": {"sentence_embedding_dimension": 16, "num_labels": 2}}.get(name, {})
        with pytest.raises(ValueError, match=f"{name} has no compute_loss_from_embeddings"):
            cached.CachedLoss(getattr(losses, name)(model, **options))
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        cached.CachedLoss(losses.CoSENTLoss(model), 0)
    with pytest.raises(ValueError, match="static embeddings"):
        cached.CachedLoss(losses.CoSENTLoss(sentences.static_model()))


def gradient(model: Any) -> Tensor:
    """Return all gradients as one vector, and clear the gradients."""
    vector = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return vector
