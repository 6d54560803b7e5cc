"""The choice of simulated batches from a trainer's data."""

from pathlib import Path

import pytest
import torch
import trl_trainers
from late_imports import LateModule

batches = LateModule("hf_memopt.planning.workloads.trainer_batches")

SETTINGS = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}


@pytest.mark.parametrize(("longest", "shapes"), [(0, [9, 4]), (5, [4, 9]), (15, [4, 9])])
def test_the_largest_batch_and_those_before_it_make_a_window(longest: int, shapes: list[int], tmp_path: Path) -> None:
    trainer = trl_trainers.plain(
        tmp_path, lambda number: 9 if number == longest else 4, gradient_accumulation_steps=2, **SETTINGS
    )
    window = batches.largest_window(trainer, 100)
    assert [batch["input_ids"].shape[1] for batch in window.batches] == shapes
    assert (window.num_seen, window.is_all, window.moves) == (8, True, True)
    assert str(window) == "input_ids 2x9, labels 2x9"


def test_no_more_batches_are_drawn_than_asked_for_and_no_worker_is_started(tmp_path: Path) -> None:
    trainer = trl_trainers.plain(tmp_path, dataloader_num_workers=2, dataloader_prefetch_factor=2, **SETTINGS)
    window = batches.largest_window(trainer, 3)
    assert (window.num_seen, window.is_all) == (3, False)
    assert trainer.args.dataloader_num_workers == 0


def test_a_dataloader_that_leaves_batches_on_the_host_is_noticed(tmp_path: Path) -> None:
    trainer = trl_trainers.plain(tmp_path)
    trainer.get_train_dataloader = lambda: [{"input_ids": torch.zeros(1, 4)}]
    assert not batches.largest_window(trainer, 3).moves


def test_the_update_with_the_longest_text_counts(tmp_path: Path) -> None:
    trainer = trl_trainers.grpo(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    longer = [{"prompt": "then one two"}, *batch[1:]]
    trainer.get_train_dataloader = lambda: [batch, longer, batch]
    assert batches.num_bytes(longer) > batches.num_bytes(batch) > 0
    assert batches.largest_window(trainer, 3).batches == [longer]


def test_tensors_are_found_in_nested_containers() -> None:
    batch = {"a": [torch.zeros(2), {"b": torch.zeros(3, dtype=torch.long)}], "text": "one"}
    assert {name: tensor.shape[0] for name, tensor in batches.tensors_of(batch).items()} == {"a.0": 2, "a.1.b": 3}
    assert batches.num_bytes(batch) == 2 * 4 + 3 * 8
