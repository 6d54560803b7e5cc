"""Tests of activation offloading in two processes: Trainer under DDP, and modules sharded by FSDP2."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    on_ranks("offload_rank:train", str(folder))
    return folder


def same_tensors(first: Path, second: Path) -> bool:
    want, got = load_file(first), load_file(second)
    return want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def counts(file: Path) -> Any:
    return json.loads(file.with_name(f"{file.name}.json").read_text())


@pytest.mark.parametrize("how", ["attach", "callback", "disk"])
@pytest.mark.parametrize("rank", [0, 1])
def test_trainer_under_ddp_ends_with_the_plain_weights(results: Path, how: str, rank: int) -> None:
    assert same_tensors(results / f"ddp_plain_{rank}", results / f"ddp_{how}_{rank}")
    assert same_tensors(results / f"ddp_{how}_0", results / f"ddp_{how}_{rank}")
    assert counts(results / f"ddp_{how}_{rank}")["moved"] > 0
    assert counts(results / f"ddp_{how}_{rank}")["live"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["context", "wrap"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_modules_have_the_plain_gradients(results: Path, how: str, precision: str, rank: int) -> None:
    assert same_tensors(results / f"fsdp_plain_{precision}_{rank}", results / f"fsdp_{how}_{precision}_{rank}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["context", "wrap"])
def test_of_sharded_modules_only_activations_move(results: Path, how: str, precision: str) -> None:
    """Compare moved bytes with one process with whole weights; no gathered weights move."""
    sharded = counts(results / f"fsdp_{how}_{precision}_0")
    whole = counts(results / f"fsdp_one_process_{precision}_0")
    assert sharded["moved"] == whole["moved"] > 0
    assert sharded["weights_moved"] == 0
    assert sharded["live"] == 0


def test_saved_dtensors_stay_on_the_device(results: Path) -> None:
    assert same_tensors(results / "dtensor_plain_0", results / "dtensor_context_0")
    assert counts(results / "dtensor_0")["context"]["moved"] == 0


@pytest.mark.parametrize(("name", "rank"), [("impossible", 0), ("impossible", 1), ("in_between", 1)])
def test_a_rank_refuses_a_budget_that_is_too_small_for_itself(results: Path, name: str, rank: int) -> None:
    outcome = counts(results / f"budget_{name}_{rank}")
    assert outcome["step"] == 1
    assert outcome["needed_bytes"] == outcome["demands"][rank]
    assert outcome["message"].startswith(f"rank {rank}: budget_gib={outcome['budget_gib']:.4f} is too small")


@pytest.mark.parametrize(("name", "rank"), [("enough", 0), ("enough", 1), ("in_between", 0)])
def test_a_rank_that_can_keep_its_budget_goes_on_alone(results: Path, name: str, rank: int) -> None:
    outcome = counts(results / f"budget_{name}_{rank}")
    assert outcome["needed_bytes"] is None
    assert outcome["step"] == 3
