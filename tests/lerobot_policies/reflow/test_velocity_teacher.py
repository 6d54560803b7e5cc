import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

fsdp = LateModule("torch.distributed.fsdp")
velocity_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")


def student(**settings: Any) -> Any:
    sharing = {
        "type": "smolvla_reflow",
        "share_prefix": "auto",
        "train_expert_only": True,
        "prefix_length": -1,
        "compile_model": False,
    }
    vlm = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model = nn.ModuleDict({"vlm_with_expert": nn.ModuleDict({"vlm": vlm})})
    return SimpleNamespace(config=SimpleNamespace(**{**sharing, **settings}), model=model)


def teacher_of(taught: Any) -> Any:
    """A stand-in that only decides whether it shares the student's prefix."""

    class Standing(velocity_teacher.VelocityTeacher):
        @property
        def num_steps(self) -> int:
            return 1

        def load(self, student: Any) -> Any:
            self._share(velocity_teacher.why_student_cannot_share(student))
            return student

        def visit(self) -> AbstractContextManager[Any]:
            return nullcontext()

        def sample(self, observation: Any, noise: Any, prefix: Any) -> Any:
            return noise

    return Standing(taught.config)


def test_nothing_keeps_a_student_with_a_frozen_vlm_from_sharing() -> None:
    assert velocity_teacher.why_student_cannot_share(student()) is None


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A device mesh of this process alone."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_sharded_student_is_refused_by_the_name_of_its_part(mesh: DeviceMesh) -> None:
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    velocity_teacher.check_replicated(policy)
    fsdp.fully_shard(policy[1], mesh=mesh)
    with pytest.raises(ValueError, match=r"the student is sharded \(1\); .*\(parallelism.dp_shard=1\)"):
        velocity_teacher.check_replicated(policy)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("share_prefix", "off", "share_prefix=off was asked for"),
        ("train_expert_only", False, "--policy.train_expert_only=true would freeze it"),
        ("prefix_length", 1, "--policy.prefix_length=-1 would not"),
        ("compile_model", True, "--policy.compile_model=false would not"),
    ],
)
def test_the_setting_that_keeps_it_is_named(setting: str, value: Any, reason: str) -> None:
    assert reason in velocity_teacher.why_student_cannot_share(student(**{setting: value}))


def test_the_weight_of_the_vlm_that_is_trained_is_named() -> None:
    taught = student()
    taught.model.vlm_with_expert.vlm[1].bias.requires_grad_()
    assert "trains the VLM's weight 1.bias (freeze it" in velocity_teacher.why_student_cannot_share(taught)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "shared prefix: on; the VLM is held and run once for student and teacher"),
        ({"share_prefix": "off"}, "shared prefix: off; share_prefix=off was asked for"),
    ],
)
def test_loading_says_whether_the_prefix_is_shared(settings: Any, line: str, caplog: pytest.LogCaptureFixture) -> None:
    taught = student(**settings)
    teacher = teacher_of(taught)
    assert teacher.why_not_shared == "the teacher is not loaded"
    with caplog.at_level(logging.INFO):
        teacher.load(taught)
    assert [record.message for record in caplog.records] == [line]
    assert (teacher.why_not_shared is None) == (settings == {})


def test_a_prefix_that_is_not_shared_is_not_computed() -> None:
    taught = student(share_prefix="off")
    teacher = teacher_of(taught)
    assert teacher.shared_prefix(taught, None) is None  # not loaded yet
    teacher.load(taught)
    assert teacher.shared_prefix(taught, None) is None


def test_on_is_refused_where_it_cannot_be_had() -> None:
    taught = student(share_prefix="on", compile_model=True)
    teacher = teacher_of(taught)
    with pytest.raises(ValueError, match=r"share_prefix=on cannot be had: compile_model compiles"):
        teacher.load(taught)
    assert teacher.why_not_shared is not None


def test_a_teacher_without_weights_of_its_own_checks_prefetches_and_reports_nothing() -> None:
    teacher = teacher_of(student())
    teacher.check(None)
    teacher.prefetch()
    assert teacher.report() is None
