"""Tests with recorded loops, 0.6.2 from lerobot's main branch. `tests/canaries` compares them with lerobot's."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from late_imports import LateModule

lerobot_runs = LateModule("lerobot_runs")
lerobot_loop = LateModule("hf_memopt.recipes.reflow.lerobot_loop")

NUM_BATCHES = 4
ACCUMULATES = "hf_memopt.recipes.reflow.lerobot_loop.LOOP_ACCUMULATES"


def next_make_accelerator(cfg: Any) -> Accelerator:
    assert lerobot_loop.ACCUMULATION_VARIABLE not in os.environ, "lerobot refuses it"
    steps = cfg.accelerator.gradient_accumulation.steps
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
    return Accelerator(cpu=True, mixed_precision=cfg.accelerator.mixed_precision, gradient_accumulation_plugin=plugin)


def load_training_step(save_dir: Path) -> int:
    return int(json.loads((save_dir / "training_step.json").read_text())["step"])


def next_load_training_metadata(training_state_dir: Path) -> dict[str, Any]:
    return {"step": load_training_step(training_state_dir), "batch_size": None}


def run_loop(accelerator: Accelerator, accumulates: bool) -> None:
    """Lower a weight, at first 0, by each batch's gradient, 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weight = model.weight
    accelerator.updates = [weight.item()]
    for _ in range(NUM_BATCHES):
        if accumulates:
            accelerator._do_sync()  # `accelerator.accumulate`, without a model to synchronise
        accelerator.backward(weight.sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.updates.append(weight.item())


@pytest.fixture(params=["0.6.1", "0.6.2"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Accelerator]:
    """The accelerators that the loop of a version of lerobot gets."""
    is_next, seen = request.param == "0.6.2", []
    monkeypatch.setattr(ACCUMULATES, is_next)

    def this_train(cfg: Any, accelerator: Accelerator) -> None:
        seen.append(accelerator)
        run_loop(accelerator, accumulates=False)

    def next_train(cfg: Any) -> None:
        seen.append(lerobot_loop.lerobot_train.make_accelerator(cfg))
        run_loop(seen[-1], accumulates=True)

    monkeypatch.setattr(lerobot_loop.lerobot_train, "train", next_train if is_next else this_train)
    monkeypatch.setattr(lerobot_loop.lerobot_train, "make_accelerator", next_make_accelerator, raising=False)
    for load in (load_training_step, next_load_training_metadata):
        monkeypatch.setattr(lerobot_loop.train_utils, load.__name__.removeprefix("next_"), load, raising=False)
    return seen


def config(dtype: str = "float32", steps: int = 1) -> Any:
    """Return the fields of a run's configuration that the loop uses."""
    accelerator = SimpleNamespace(gradient_accumulation=SimpleNamespace(steps=steps), mixed_precision="no")
    policy = SimpleNamespace(dtype=dtype, device="cpu")
    return SimpleNamespace(policy=policy, accelerator=accelerator, resume=False)


@pytest.mark.parametrize("num_accumulation_steps", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_makes_one_update_whoever_accumulates(
    num_accumulation_steps: int, dtype: str, seen: list[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    after: list[tuple[Accelerator, int]] = []
    with lerobot_runs.new_process(()):
        monkeypatch.setenv(lerobot_loop.ACCUMULATION_VARIABLE, "3")  # the recipe has read the variable before
        cfg = config(dtype)
        lerobot_loop.settle_accumulation(cfg, num_accumulation_steps)
        lerobot_loop.train(cfg, num_accumulation_steps, lambda *given: after.append(given))
        (accelerator,) = seen
        # From 0.6.2 on, the policy itself applies autocast.
        bf16 = dtype == "bfloat16" and not lerobot_loop.LOOP_ACCUMULATES
        assert accelerator.mixed_precision == ("bf16" if bf16 else "no")
    assert accelerator.updates == ([0, -1, -2, -3, -4] if num_accumulation_steps == 1 else [0, 0, -1, -1, -2])
    assert after == [(accelerator, number) for number in range(1, NUM_BATCHES + 1)]
    assert (type(accelerator) is Accelerator) == lerobot_loop.LOOP_ACCUMULATES
    assert lerobot_loop.lerobot_train.make_accelerator is next_make_accelerator


@pytest.mark.parametrize(("asked", "lerobots", "used"), [(1, 1, 1), (4, 1, 4), (1, 4, 4), (4, 4, 4)])
def test_lerobots_own_flag_counts_where_it_exists(
    asked: int, lerobots: int, used: int, seen: list[Accelerator]
) -> None:
    cfg = config(steps=lerobots)
    if not lerobot_loop.LOOP_ACCUMULATES:
        assert lerobot_loop.settle_accumulation(SimpleNamespace(), asked) == asked
        return
    assert lerobot_loop.settle_accumulation(cfg, asked) == cfg.accelerator.gradient_accumulation.steps == used


def test_two_flags_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACCUMULATES, True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0 must be at least 1"):
        lerobot_loop.settle_accumulation(config(), 0)
    with pytest.raises(ValueError, match=r"steps=2 and accelerator.gradient_accumulation.steps=4 differ; pass one"):
        lerobot_loop.settle_accumulation(config(steps=4), 2)


def test_the_step_of_a_checkpoint_is_read(seen: list[Accelerator], tmp_path: Path) -> None:
    (tmp_path / "training_state").mkdir()
    (tmp_path / "training_state" / "training_step.json").write_text('{"step": 6, "num_processes": 1}')
    assert lerobot_loop.resumed_step(SimpleNamespace(resume=True, checkpoint_path=tmp_path)) == 6
    assert lerobot_loop.resumed_step(SimpleNamespace(resume=False, checkpoint_path=None)) == 0
