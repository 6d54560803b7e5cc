"""Tests of activation offloading under DeepSpeed's ZeRO in two processes, by Accelerate and by Trainer."""

from importlib.util import find_spec
from typing import Any

import pytest
from ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

STAGES = (2, 3)
MODES = ("all", "auto")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks("zero_rank:outcomes", str(tmp_path_factory.mktemp("zero")), DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["accelerate", "trainer"])
def test_training_ends_with_the_plain_weights(ranks: list[dict[str, Any]], way: str, stage: int, mode: str) -> None:
    for found in (rank[f"{way} {stage} {mode}"] for rank in ranks):
        assert found["learned"]
        assert found["equal"]
        assert found["moved"] > 0
        assert found["live"] == 0


def test_of_gathered_weights_none_move(ranks: list[dict[str, Any]]) -> None:
    """Compare moved bytes with ZeRO-2, plus inputs that DeepSpeed's linear function saves again."""
    for rank in ranks:
        stage_2, stage_3 = (rank[f"accelerate {stage} all"] for stage in (2, 3))
        assert stage_3["moved"] == stage_2["moved"] + stage_3["shared_inputs"]


@pytest.mark.parametrize("mode", MODES)
def test_none_of_them_stay_until_backward(ranks: list[dict[str, Any]], mode: str) -> None:
    """Check that ZeRO-3 frees them after forward, also in steps recorded for a plan."""
    assert [rank[f"accelerate 3 {mode}"]["gathered_left"] for rank in ranks] == [0, 0]
