"""The plug-in for axolotl, on a stand-in for the base class of its plug-ins: axolotl itself is not installed."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from late_imports import LateModule

stand_ins = LateModule("docs_stand_ins")


class BasePlugin:
    """What axolotl calls of a plug-in here, with the signatures of its commit 002a637."""

    def get_input_args(self) -> str | None: ...

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load the plug-in as axolotl does: by the name in the YAML file."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", BasePlugin, raising=False)
    module = importlib.import_module("hf_memopt.integrations.axolotl")
    yield module.MemoptPlugin()
    del sys.modules["hf_memopt.integrations.axolotl"]


def test_it_attaches_what_the_file_says(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = []
    for memopt in (None, {"offload": "all", "offload_threshold_mb": 0, "cpu_copies": True, "leak_check": True}):
        trainer = stand_ins.Toys("")["trainer"]
        if memopt is not None:
            plugin.post_trainer_create({"memopt": memopt}, trainer)
        trainer.train()
        weights.append([each.detach() for each in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    callbacks = {type(each).__name__: each for each in trainer.callback_handler.callbacks}
    assert callbacks["OffloadedLoss"].offloader.stats.bytes_moved > 0
    assert {"MemoryLoggingCallback", "LeakDetectionCallback"} < set(callbacks)


def test_the_files_keys_are_checked(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    inputs = getattr(importlib.import_module(module), name)
    assert inputs.model_validate({"memopt": {"budget_gib": 6}, "base_model": "x"}).memopt == {"budget_gib": 6}
    assert inputs.model_validate({}).memopt is None
    with pytest.raises(ValueError, match="memopt: 'budget' sets no field; there are offload, "):
        plugin.post_trainer_create({"memopt": {"budget": 6}}, None)
    with pytest.raises(ValueError, match="budget_gib"):
        plugin.post_trainer_create({"memopt": {"budget_gib": -1}}, None)
