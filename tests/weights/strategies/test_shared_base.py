"""Tests of a PEFT student whose base is the teacher: the base's exact outputs, or a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt.weights import OffloadedTeacher

peft = LateModule("peft")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.dropout(self.first(x)).tanh()))


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def adapted(network: nn.Module, **settings: Any) -> peft.PeftModel:
    config = peft.LoraConfig(**{"target_modules": ["first", "second"], "lora_dropout": 0.3, "r": 2, **settings})
    student = peft.get_peft_model(network, config).train()
    for parameter in student.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return student


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"modules_to_save": ["head"]}], ids=["lora", "dora", "head"]
)
def test_the_teacher_is_the_base_and_the_student_is_as_before(
    network: Network, x: Tensor, settings: dict[str, Any]
) -> None:
    want = copy.deepcopy(network).eval()(x)
    student = adapted(network, **settings)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    state = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    teacher = OffloadedTeacher(student, device="cpu", share_with=student)
    for _ in range(2):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(x), want)
        assert {name for name, p in student.named_parameters() if p.requires_grad} == trained
        assert student.training
        assert all(module.training for module in student.modules())
        assert not torch.equal(student(x), want)
    assert all(torch.equal(state[name], tensor) for name, tensor in student.state_dict().items())
    report = teacher.report()
    assert (report.mode, report.host_bytes, report.device_bytes) == ("shared", 0, 0)
    assert report.shared_bytes == sum(p.nbytes for p in student.parameters() if not p.requires_grad)


def test_the_base_inside_of_the_student_will_do(network: Network, x: Tensor) -> None:
    want = copy.deepcopy(network).eval()(x)
    student = adapted(network)
    with OffloadedTeacher(student.get_base_model(), device="cpu", share_with=student).onload() as base:
        assert torch.equal(base(x), want)


def test_the_student_trains_on_after_an_exception_in_a_visit(network: Network, x: Tensor) -> None:
    student = adapted(network)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    teacher = OffloadedTeacher(student, device="cpu", share_with=student)
    with pytest.raises(KeyError, match="injected"), teacher.onload():
        raise KeyError("injected")
    student(x).sum().backward()
    assert {name for name, p in student.named_parameters() if p.grad is not None} == trained


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda network: adapted(network, bias="all"), r"trains .*bias, which belongs to the base"),
        (lambda network: adapted(nn.Sequential(network, nn.BatchNorm1d(2))), "keeps running statistics"),
        (lambda network: network, "Network is not a PeftModel"),
    ],
    ids=["bias", "batch norm", "no adapter"],
)
def test_a_base_that_training_changes_is_refused(network: Network, make: Any, reason: str) -> None:
    student = make(network)
    with pytest.raises(ValueError, match=rf"base cannot be its teacher: .*{reason}.*a model of its own"):
        OffloadedTeacher(student, device="cpu", share_with=student)
    assert any(p.requires_grad for p in student.parameters())


def test_sharded_weights_are_refused(network: Network) -> None:
    student = adapted(network)
    next(student.parameters())._is_flat_param = True  # as FSDP marks its parameters
    with pytest.raises(ValueError, match="is sharded, and FSDP gathers"):
        OffloadedTeacher(student, device="cpu", share_with=student)


def test_an_adapter_that_is_merged_later_is_refused(network: Network) -> None:
    student = adapted(network)
    teacher = OffloadedTeacher(student, device="cpu", share_with=student)
    student.merge_adapter()
    with pytest.raises(RuntimeError, match="merged into the base"), teacher.onload():
        pass
    with pytest.raises(ValueError, match="merged into the base"):
        OffloadedTeacher(student, device="cpu", share_with=student)


@pytest.mark.parametrize("options", [{"mode": "swap"}, {"dtype": torch.bfloat16}])
def test_a_base_cannot_be_moved_or_cast(network: Network, options: dict[str, Any]) -> None:
    student = adapted(network)
    with pytest.raises(ValueError, match="use mode='auto' and no dtype"):
        OffloadedTeacher(student, device="cpu", share_with=student, **options)
