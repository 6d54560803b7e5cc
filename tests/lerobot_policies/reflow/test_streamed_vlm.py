"""Tests of a student whose frozen VLM visits the device, with its teacher's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_bases import same
from late_imports import LateModule
from torch import Tensor

reflow_students = LateModule("reflow_students")
pi0_toys = LateModule("pi0_toys")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")

Make = Callable[..., Any]


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("offload", ["swap", "stream", "resident"])
@pytest.mark.parametrize("share_prefix", ["on", "off"])
@pytest.mark.sweep(share=0.25)
def test_gradients_are_those_of_the_resident_run(
    make: Make, batch: Any, noise: Tensor, time: Tensor, share_prefix: str, offload: str, home: str
) -> None:
    flags = {"share_prefix": share_prefix, "teacher_offload": offload}
    want = reflow_students.second_step(make(**flags), batch, noise, time)
    policy = make(**flags, vlm_home=home)
    assert same(reflow_students.second_step(policy, batch, noise, time), want)
    report = policy.base.report()
    assert report.home == home
    assert report.device_bytes == 0
    assert report.peak_device_bytes < 0.5 * report.streamed_bytes
    assert policy.memory_figures()["memory/frozen_device_gib"] > 0


@pytest.mark.parametrize(
    "flags", [{"reflow_target": "self", "reflow_real_data": 0.5}, {"use_reflow": False}, {"dtype": "bfloat16"}]
)
def test_it_goes_with_other_ways_to_train(
    make: Make, batch: Any, noise: Tensor, time: Tensor, flags: dict[str, Any]
) -> None:
    want = reflow_students.second_step(make(**flags), batch, noise, time)
    assert same(reflow_students.second_step(make(**flags, vlm_home="host"), batch, noise, time), want)


def test_checkpoints_and_answers_are_those_of_the_resident_run(
    make: Make, batch: Any, noise: Tensor, time: Tensor, tmp_path: Path
) -> None:
    plain, policy = make(), make(vlm_home="host")
    for each in (plain, policy):
        reflow_students.second_step(each, batch, noise, time)
        each.eval()
    policy.save_pretrained(tmp_path)
    loaded = modeling_smolvla.SmolVLAPolicy.from_pretrained(plain.config.teacher_model_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items() if name in saved)
    assert len(saved) == len(load_file(Path(plain.config.teacher_model_path) / "model.safetensors"))
    loaded.load_state_dict(saved, strict=False)
    with torch.no_grad():
        answers = [each.predict_action_chunk(dict(batch), noise=noise) for each in (plain, policy)]
    assert torch.equal(*answers)


@pytest.mark.usefixtures("toy_pi")
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.4)
def test_pi0_and_pi05(random_teacher: Path, noise: Tensor, time: Tensor, home: str) -> None:
    batch = pi0_toys.make_batch()
    want = reflow_students.second_step(pi0_toys.make_student(random_teacher), batch, noise, time)
    policy = pi0_toys.make_student(random_teacher, vlm_home=home)
    assert same(reflow_students.second_step(policy, batch, noise, time), want)
    report = policy.base.report()
    # A norm's weight that another module reads waits for a backward pass through the VLM, of which there is none.
    assert report.device_bytes < 0.01 * report.streamed_bytes


def test_a_student_without_frozen_weights_is_told_so(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make(vlm_home="host", share_prefix="off")
    policy.requires_grad_(True)
    with pytest.raises(ValueError, match="no frozen weights"):
        policy(batch, noise=noise, time=time)
