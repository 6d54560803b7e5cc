"""Tests that a student that teaches itself samples with its present weights, without a copy or a trace."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
self_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")
reflow_students = LateModule("reflow_students")

Make = Callable[..., Any]


def stock(student: Any, batch: Any, noise: Tensor, num_steps: int) -> Tensor:
    twin = copy.deepcopy(student).eval()
    twin.config.num_steps = num_steps
    return twin.model.sample_actions(*known_flows.observe(twin, batch).arguments(), noise=noise).detach()


@pytest.mark.parametrize("shared", [True, False])
def test_it_samples_with_the_students_present_weights(make: Make, batch: Any, noise: Tensor, shared: bool) -> None:
    student = make(teacher_num_steps=2)
    teacher = self_teacher.SelfTeacher(student.config)
    assert teacher.load(student) is student
    assert teacher.load(student) is student
    targets = []
    for _ in range(2):
        observation = known_flows.observe(student, batch)
        prefix = teacher.shared_prefix(student, observation) if shared else None
        assert (prefix is not None) == shared
        targets.append(teacher.sample(observation, noise, prefix))
        assert (targets[-1].shape, targets[-1].dtype) == (noise.shape, torch.float32)
        assert not targets[-1].requires_grad
        tolerance = reflow_students.TOLERANCE
        torch.testing.assert_close(targets[-1], stock(student, batch, noise, 2), rtol=tolerance, atol=tolerance)
        with torch.no_grad():
            student.model.action_out_proj.bias.add_(0.1)
    assert not torch.allclose(*targets, atol=1e-3)


def test_the_solver_takes_its_own_number_of_steps_or_the_students(make: Make) -> None:
    config = make().config
    config.num_steps = 5
    assert self_teacher.SelfTeacher(config).num_steps == 2
    config.teacher_num_steps = 3
    assert self_teacher.SelfTeacher(config).num_steps == 3


def test_a_visit_evaluates_without_autocast_and_leaves_the_mode_as_it_was(make: Make) -> None:
    student = make()
    teacher = self_teacher.SelfTeacher(student.config)
    teacher.load(student)
    for training in (True, False):
        student.model.train(training)
        with torch.autocast("cpu", torch.bfloat16):
            with teacher.visit() as model, teacher.visit():
                assert model is student.model
                assert not any(module.training for module in model.modules())
                assert not torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_enabled("cpu")
        assert student.model.training == training


def test_an_error_in_a_visit_leaves_the_mode_as_it_was(make: Make) -> None:
    student = make()
    teacher = self_teacher.SelfTeacher(student.config)
    teacher.load(student)
    with pytest.raises(ZeroDivisionError), teacher.visit():
        raise ZeroDivisionError
    assert student.model.training


def test_it_owns_nothing_and_follows_the_student_that_loads_it(make: Make) -> None:
    first = make()
    second = copy.deepcopy(first)
    teacher = self_teacher.SelfTeacher(first.config)
    teacher.load(first)
    assert teacher.report() is None
    assert teacher.load(second) is second
    with teacher.visit() as model:
        assert model is second.model
    gone = weakref.ref(second)
    del second, model
    gc.collect()
    assert gone() is None


def test_copies_carry_the_configuration_alone(make: Make) -> None:
    student = make()
    teacher = self_teacher.SelfTeacher(student.config)
    teacher.load(student)
    for twin in (copy.deepcopy(teacher), pickle.loads(pickle.dumps(teacher))):
        assert type(twin) is self_teacher.SelfTeacher
        assert twin.num_steps == teacher.num_steps
        assert twin.why_not_shared == "the teacher is not loaded"
