"""Tests that targets are stock lerobot's, weights leave the device, and obstacles are named."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from late_imports import LateModule
from safetensors.torch import load_file, save_file
from torch import Tensor

reflow_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")
reflow_students = LateModule("reflow_students")


Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("share_prefix", "off", "share_prefix=off"),
        ("train_expert_only", False, "--policy.train_expert_only=true"),
        ("prefix_length", 200, "--policy.prefix_length=-1"),
        ("compile_model", True, "--policy.compile_model=false"),
    ],
)
def test_an_obstacle_is_logged_with_its_flag(make: Make, setting: str, value: Any, reason: str, caplog: Any) -> None:
    architecture = {setting: value} if setting == "prefix_length" else {}
    policy = make(architecture=architecture)
    setattr(policy.config, setting, value)
    with caplog.at_level(logging.INFO):
        policy.load_teacher_model()
    lines = [record.message for record in caplog.records if record.message.startswith("shared prefix")]
    assert len(lines) == 1
    assert reason in lines[0]
    assert policy.teacher.report().shared_bytes == 0


def test_another_vlm_is_an_obstacle_and_on_refuses_it(make: Make) -> None:
    policy = make(share_prefix="on")
    name, weight = next(iter(policy.model.vlm_with_expert.vlm.named_parameters()))
    weight.data.view(-1)[0] += 1e-3
    with pytest.raises(ValueError, match=f"share_prefix=on cannot be had: .*{name}.*prepare-student"):
        policy.load_teacher_model()


@pytest.mark.parametrize("mode", ["resident", "swap", "auto"])
def test_target_is_bitwise_the_stock_teachers(make: Make, batch: Any, noise: Tensor, mode: str) -> None:
    policy = make(share_prefix="off", teacher_offload=mode)
    want = reflow_students.stock_target(policy, batch, noise)
    assert torch.equal(reflow_students.target(policy, batch, noise), want)
    assert torch.equal(reflow_students.target(policy, batch, noise), want)


@pytest.mark.parametrize("mode", ["swap", "stream", "auto"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.sweep(share=0.4)
def test_a_teacher_is_read_from_its_checkpoint_and_a_cast_one_from_a_file_of_ours(
    make: Make, batch: Any, noise: Tensor, mode: str, dtype: str | None
) -> None:
    flags = {"share_prefix": "off", "teacher_dtype": dtype}
    want = reflow_students.target(make(**flags), batch, noise)
    policy = make(**flags, teacher_offload=mode, teacher_home="file")
    for _ in range(2):
        assert torch.equal(reflow_students.target(policy, batch, noise), want)
    report = policy.teacher.report()
    assert (report.home, report.mode) == ("file", "stream" if mode == "auto" else mode)
    pieces = policy.teacher._offloaded._at_home._block.pieces.values()
    theirs = sum(piece.num_bytes for piece in pieces if piece.file.name.endswith("model.safetensors"))
    assert (theirs > 0.9 * sum(piece.num_bytes for piece in pieces)) == (dtype is None)


@pytest.mark.parametrize("mode", ["resident", "swap"])
def test_shared_target_is_the_stock_teachers_up_to_rounding(make: Make, batch: Any, noise: Tensor, mode: str) -> None:
    policy = make(share_prefix="on", teacher_offload=mode)
    got = reflow_students.target(policy, batch, noise)
    torch.testing.assert_close(
        got,
        reflow_students.stock_target(policy, batch, noise),
        rtol=reflow_students.TOLERANCE,
        atol=reflow_students.TOLERANCE,
    )
    assert torch.equal(got, reflow_students.target(policy, batch, noise))


def test_modes_agree_bitwise_with_a_shared_prefix(make: Make, batch: Any, noise: Tensor) -> None:
    targets = [
        reflow_students.target(make(share_prefix="on", teacher_offload=mode), batch, noise)
        for mode in ("resident", "swap")
    ]
    assert torch.equal(*targets)


def test_teacher_num_steps_sets_the_solver(make: Make, batch: Any, noise: Tensor) -> None:
    policy = make(share_prefix="off", teacher_num_steps=3)
    assert torch.equal(
        reflow_students.target(policy, batch, noise), reflow_students.stock_target(policy, batch, noise, num_steps=3)
    )


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_bf16_teacher_is_near_and_keeps_buffers_and_projections(
    make: Make, batch: Any, noise: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix, teacher_dtype="bfloat16")
    error = (
        (reflow_students.target(policy, batch, noise) - reflow_students.stock_target(policy, batch, noise))
        .square()
        .mean()
        .sqrt()
    )
    assert 0 < error < 0.05
    model = policy.load_teacher_model().model
    assert {p.dtype for p in model.vlm_with_expert.lm_expert.parameters()} == {torch.bfloat16}
    vlm_dtype = torch.float32 if share_prefix == "on" else torch.bfloat16
    assert {p.dtype for p in model.vlm_with_expert.vlm.parameters()} == {vlm_dtype}
    assert model.action_out_proj.weight.dtype == torch.float32
    assert not any(buffer.dtype == torch.bfloat16 for buffer in model.buffers())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "teacher_dtype": "float32"}, False),
        ({"dtype": "bfloat16", "teacher_dtype": "bfloat16"}, False),
        ({}, False),
    ],
)
def test_a_float32_teacher_of_a_bf16_student_says_what_it_costs(
    make: Make, flags: dict[str, str], said: bool, caplog: Any
) -> None:
    policy = make(**flags)
    with caplog.at_level(logging.INFO):
        weights = policy.load_teacher_model().model.vlm_with_expert.lm_expert.parameters()
    mib = sum(weight.nbytes for weight in weights) / 2**20
    expected = f"--policy.teacher_dtype=bfloat16 makes {mib:.1f} MiB of its weights {mib / 2:.1f} MiB"
    lines = [record.message for record in caplog.records if "teacher_dtype" in record.message]
    assert [expected in line for line in lines] == [True] * said


@pytest.mark.parametrize("share_prefix", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_right_after_a_fault_in_any_copy(
    make: Make, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix)
    want, _ = policy(batch, noise=noise, time=time)
    for fail_at in (1, 2, 3, 5):  # allocate, copy and wait of the first visit, and a copy of the second
        policy.teacher = reflow_teacher.ReflowTeacher(policy.config, AdversarialCopier("late", fail_at=fail_at))
        losses = []
        for _ in range(3):
            try:
                losses.append(policy(batch, noise=noise, time=time)[0])
            except InjectedError:
                losses.append(None)
        assert losses.count(None) == 1
        assert all(torch.equal(loss, want) for loss in losses if loss is not None)
        assert policy.teacher.report().device_bytes == 0


def test_right_after_a_fault_in_any_forward(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    want, _ = policy(batch, noise=noise, time=time)
    countdown = 0

    def maybe_fail(*_: Any) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise torch.OutOfMemoryError("injected")

    policy.load_teacher_model().model.action_in_proj.register_forward_pre_hook(maybe_fail)
    for countdown in (1, 6, 10):  # of the ten Euler steps  # noqa: B007
        with pytest.raises(torch.OutOfMemoryError):
            policy(batch, noise=noise, time=time)
        assert policy.teacher.report().device_bytes == 0
        assert torch.equal(policy(batch, noise=noise, time=time)[0], want)


def test_update_prefetches_and_the_next_step_uses_it(make: Make, batch: Any) -> None:
    policy = make()
    policy.update()  # fetches nothing before the first step
    policy(batch)
    report = policy.teacher.report()
    policy.update()
    assert policy.teacher.report().device_bytes == report.host_bytes
    policy(batch)
    after = policy.teacher.report()
    assert after.device_bytes == 0
    assert after.bytes_host_to_device == 2 * report.host_bytes
    assert after.bytes_device_to_host == 0


def test_the_teacher_owns_only_its_expert_with_a_shared_prefix(make: Make) -> None:
    policy = make()
    teacher = policy.load_teacher_model()
    vlm = teacher.model.vlm_with_expert.vlm
    own = sum(p.nbytes for p in teacher.parameters()) - sum(p.nbytes for p in vlm.parameters())
    buffers = sum(b.nbytes for b in teacher.buffers())
    num_tensors = len(list(teacher.parameters())) + len(list(teacher.buffers()))
    report = policy.teacher.report()
    assert own + buffers <= report.host_bytes <= own + buffers + 256 * num_tensors
    ours = dict(policy.model.vlm_with_expert.vlm.named_parameters())
    assert all(weight.data_ptr() == ours[name].data_ptr() for name, weight in vlm.named_parameters())


def test_a_student_in_bf16_shares_a_checkpoint_that_was_saved_in_bf16(make: Make, batch: Any, tmp_path: Path) -> None:
    policy = make()
    folder = Path(shutil.copytree(policy.config.teacher_model_path, tmp_path / "teacher"))
    policy.config.teacher_model_path = str(folder)
    file = folder / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file)
    vlm = policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    policy.load_teacher_model()
    assert policy.teacher.why_not_shared is None
    assert next(vlm.parameters()).dtype == torch.bfloat16
    assert policy(batch)[0].isfinite()
