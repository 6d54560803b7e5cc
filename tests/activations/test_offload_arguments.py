"""Tests that the fields for offloading have the names, defaults and meaning of the offloader's options."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations.offload_arguments import OffloadArguments
from hf_memopt.activations.offloader import MODES

CPU = torch.device("cpu")
# Fields with another name in the offloader, or with none.
OWN = {"offload", "cpu_copies"}


def test_defaults_are_the_offloaders() -> None:
    options = signature(ActivationOffloader).parameters
    declared = {name: value for name, value in vars(OffloadArguments()).items() if name not in OWN}
    assert declared | {"skip": tuple(declared["skip"])} == {name: options[name].default for name in declared}
    assert get_args(get_type_hints(OffloadArguments)["offload"]) == ("off", *MODES)
    assert all(each.metadata["help"] for each in fields(OffloadArguments))


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_the_mode_is_what_the_offloader_does(mode: Any) -> None:
    made = OffloadArguments(offload=mode).make_offloader(CPU)
    assert (made is None) == (mode == "off")
    assert made is None or made.mode == mode


def test_each_field_reaches_the_offloader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "hf_memopt.activations.offload_arguments.ActivationOffloader", lambda **each: given.update(each)
    )
    changed = {"max_slowdown": 0.5, "offload_threshold_mb": 1.5, "prefetch_ahead": 7, "pin_memory": False}
    changed |= {"budget_gib": 2.0, "host_budget_gib": 3.0, "skip": ["lm_head"]}
    changed |= {"disk": str(tmp_path), "disk_budget_gib": 4.0}
    OffloadArguments(cpu_copies=True, **changed).make_offloader(CPU)
    assert isinstance(given.pop("copier"), SyncCopier)
    assert given == {"mode": "auto", **changed}


def test_copies_are_performed_on_a_cpu_only_where_that_is_asked_for() -> None:
    for cpu_copies in (False, True):
        made = OffloadArguments(offload="all", offload_threshold_mb=0, cpu_copies=cpu_copies).make_offloader(CPU)
        assert made is not None
        with made.offload_context(model := nn.Linear(4, 4)):
            model(torch.ones(2, 4)).exp().sum().backward()
        assert (made.stats.bytes_moved > 0) == cpu_copies


def test_a_disk_makes_a_cpu_move_what_it_saves(tmp_path: Path) -> None:
    arguments = OffloadArguments(offload="all", offload_threshold_mb=0, disk=str(tmp_path))
    made = arguments.make_offloader(CPU)
    assert made is not None
    with made.offload_context(model := nn.Linear(4, 4)):
        model(torch.ones(2, 4)).exp().sum().backward()
    assert made.stats.disk_bytes_written >= made.stats.bytes_moved > 0


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_cuda"),
    [
        ({}, False, True),
        ({"cpu_copies": True}, True, True),
        ({"disk": "."}, True, True),
        ({"disk": ".", "offload": "off"}, False, False),
    ],
)
def test_a_device_moves_something_or_not(given: dict[str, Any], on_cpu: bool, on_cuda: bool) -> None:
    arguments = OffloadArguments(**given)
    assert (arguments.moves_on("cpu"), arguments.moves_on("cuda")) == (on_cpu, on_cuda)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"disk": "missing/folder"}, "^disk='missing/folder' is no folder; name one on a local disk"),
        ({"disk_budget_gib": 2.0}, r"^disk_budget_gib=2\.0 needs disk, the folder that it is for$"),
    ],
)
def test_a_disk_is_refused_before_any_work(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        OffloadArguments(**given)
