"""Tests of two processes under DeepSpeed's ZeRO-2 and ZeRO-3: exact steps, and joint stops."""

from importlib.util import find_spec
from typing import Any

import pytest
from late_imports import LateModule
from ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

training_rank = LateModule("training_rank")

STAGES = ("2", "3")
FLOAT32 = 1e-6  # for numbers around 1, whose sums over samples have another order


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks("zero_training_rank:outcomes", DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("stage", STAGES)
def test_weights_loss_and_norm_are_those_of_all_samples(ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage]["splits"] for rank in ranks):
        assert found.keys() == training_rank.SPLITS.keys()
        assert all(len(differences) == 6 and max(differences) <= FLOAT32 for differences in found.values())


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_clips_by_the_norm_of_all(ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage]["clipped"] for rank in ranks):
        assert max(found["differences"]) <= FLOAT32
        assert (
            "ValueError: max_grad_norm=None: DeepSpeed clips by itself, with gradient_clipping=0.1" in found["refused"]
        )


@pytest.mark.parametrize("stage", STAGES)
def test_both_stop_before_the_update_when_one_has_a_bad_gradient(ranks: list[dict[str, Any]], stage: str) -> None:
    for first, second in zip(*(rank[stage]["non-finite"] for rank in ranks), strict=True):
        assert first == second
        assert first["unchanged"]
        assert first["step"] == 1
        header, finding = first["message"].splitlines()
        assert "NonFiniteGradientError: Non-finite gradient at step 2." in header
        assert finding.startswith("  rank 1, micro-batch 3: 4.")
        assert "ValueError: the window before this one ended in an error" in first["again"]
    assert len(ranks[0][stage]["non-finite"]) == 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_cache_takes_the_step_of_all_samples(ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage]["cached"] for rank in ranks):
        assert len(found["differences"]) == 6
        assert max(found["differences"]) <= FLOAT32
        assert "1 to 2 on all; under FSDP2 and DeepSpeed give all ranks the same number" in found["unequal"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_cache_stops_both_before_the_update(ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage]["cached"] for rank in ranks):
        assert "NonFiniteGradientError: Non-finite gradient at step 3." in found["bad"]
        assert "rank 0, micro-batch 1: 4." in found["bad"]
        assert found["unchanged"]
        assert "ValueError: the window before this one ended in an error" in found["again"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batcher_steps_as_train_step_and_cannot_go_back(ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage]["micro-batcher"] for rank in ranks):
        assert max(found["differences"]) <= FLOAT32
        (note,) = found["notes"]
        assert "cannot halve it under FSDP2 and DeepSpeed" in note


def test_what_is_refused(ranks: list[dict[str, Any]]) -> None:
    for refused in (rank["refused"] for rank in ranks):
        assert (
            "ValueError: zero_optimization.stage=1 does not allow exact steps; use 2 or 3, or DDP" in refused["stage"]
        )
        assert "ValueError: find_micro_batch cannot go back under FSDP2 and DeepSpeed" in refused["search"]
        assert "ValueError: fp16: DeepSpeed's loss scale would not reach the gradients of outputs" in refused["fp16"]
        for what in ("backward", "loss"):
            assert f"ValueError: {what}: DeepSpeed applies gradients itself" in refused[what]
        assert "ValueError: models, loss_fn: 2 modules, of which DeepSpeed's engine is one at" in refused["parameters"]
