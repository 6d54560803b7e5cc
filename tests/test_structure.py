"""Tests of the shape of the code: one direction, unique names, a short way for each saved tensor."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from late_imports import IMPORTED_WHILE_COLLECTING
from structure import folder_imports, groups, imports, main, modules, public_classes, repeated
from torch import nn

import hf_memopt
from hf_memopt import ActivationOffloader, SyncCopier

INSTALLED = str(Path(hf_memopt.__file__).parent)
Hook = Callable[[Any], Any]
LIBRARY = {name: file for name, file in modules().items() if ".recipes" not in name}


def test_no_modules_import_each_other() -> None:
    assert groups(imports()) == []


def test_no_folders_import_each_other() -> None:
    edges = folder_imports()
    assert edges["hf_memopt.activations"] > {"hf_memopt.activations.saved_tensors"}
    assert groups(edges) == []


def test_a_ring_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert groups(edges) == [["b", "c"]]


def test_names_of_public_classes_occur_once() -> None:
    assert repeated(name for file in LIBRARY.values() for name in public_classes(file)) == []


def test_the_planner_imports_no_torch() -> None:
    tier = "hf_memopt.transfer.tier"
    planner = [file for name, file in LIBRARY.items() if ".planner." in name or name == tier]
    assert len(planner) > 6
    assert not [file for file in planner if "import torch" in file.read_text()]
    outside = {
        other
        for name, others in imports().items()
        for other in others
        if (".planner." in name or name == tier) and ".planner" not in other
    }
    assert outside <= {"hf_memopt.ranges", "hf_memopt.units", "hf_memopt.text_table", tier}


def test_collecting_imports_nothing_slow(request: pytest.FixtureRequest) -> None:
    # Tests import slow modules by `late_imports.LateModule`.
    assert request.config.stash[IMPORTED_WHILE_COLLECTING] == []


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    printed = capsys.readouterr().out
    assert "riddles in 1,000" in printed
    assert "strongly connected groups of modules: none" in printed


class Journey:
    """A recorder of our files between a call of autograd's hooks and its return, the first call of a pass left out."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._num_calls = 0

    def hooks(self, pack: Hook, unpack: Hook) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._follow(pack), self._follow(unpack))

    def _follow(self, hook: Hook) -> Hook:
        def followed(value: Any) -> Any:
            self._num_calls += 1
            before = sys.getprofile()
            sys.setprofile(self._watch if self._num_calls > 1 else before)
            try:
                return hook(value)
            finally:
                sys.setprofile(before)

        return followed

    def _watch(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(INSTALLED):
            self.files.add(frame.f_code.co_filename.removeprefix(INSTALLED))


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_the_way_of_a_saved_tensor_is_short(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow ten files in mode "all", and three more if some storages are recomputed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    x = torch.randn(32, 64)
    budget = {"budget_gib": 1.5e5 / 2**30} if mode == "auto" else {}
    offloader = ActivationOffloader(offload_threshold_mb=0, mode=mode, copier=SyncCopier(), **budget)
    # With endless copies, recomputation alone can meet a budget.
    monkeypatch.setattr("hf_memopt.transfer.lower_memory.measure_link", lambda copier, clock: (1e5, 1e5))
    for num_steps in range(5):
        journey = Journey()
        monkeypatch.setattr("hf_memopt.activations.saved_tensor_hooks.saved_tensors_hooks", journey.hooks)
        with offloader.offload_context(model):
            model(x).square().sum().backward()
        if num_steps >= 2:
            assert 4 < len(journey.files) <= (10 if mode == "all" else 13), sorted(journey.files)
    assert (offloader.stats.bytes_recomputed > 0) == (mode == "auto")
