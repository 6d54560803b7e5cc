import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_allocator import FakeCounters
from late_imports import LateModule
from torch import Tensor, nn

callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")


GIB = 2**30


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def train(folder: Path, callback: Any) -> None:
    data = [{"x": torch.randn(8), "labels": torch.randn(2)} for _ in range(8)]
    settings: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "report_to": []}
    settings |= {"dataloader_pin_memory": False, "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(str(folder), **settings)
    transformers.Trainer(Regression(), arguments, train_dataset=data, callbacks=[callback]).train()


def test_the_cache_is_returned_after_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counters = FakeCounters(total_bytes=10 * GIB)
    counters.move(3 * GIB)
    counters.move(-GIB)  # stays in the cache

    def empty_cache() -> None:
        counters.reserved_bytes = counters.allocated_bytes

    monkeypatch.setattr(torch.accelerator, "empty_cache", empty_cache)
    with caplog.at_level(logging.INFO, "hf_memopt.callbacks.cache_clearing"):
        train(tmp_path, callbacks.ClearCacheOnSaveCallback(counters=counters))
    lines = [record.message for record in caplog.records if record.name == "hf_memopt.callbacks.cache_clearing"]
    assert lines == [
        "step 2: returned 1.00 GiB of unused device memory",
        "step 4: returned 0.00 GiB of unused device memory",
    ]


def test_on_the_cpu_garbage_is_collected(tmp_path: Path) -> None:
    class Garbage:
        pass

    gc.disable()
    try:
        garbage = Garbage()
        garbage.itself = garbage
        reference = weakref.ref(garbage)
        del garbage
        train(tmp_path, callbacks.ClearCacheOnSaveCallback())
    finally:
        gc.enable()
    assert reference() is None
