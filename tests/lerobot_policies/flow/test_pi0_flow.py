"""Tests of the shared prefix of π0 and π0.5: exact, smaller, and refused where not exact."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from late_imports import LateModule
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_memopt.memory import SavedBytes

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
reflow_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")
pi0_toys = LateModule("pi0_toys")
reflow_students = LateModule("reflow_students")

pytestmark = pytest.mark.usefixtures("toy_pi")


# Of a token or a condition that only this policy's expert has.
PROJECTIONS = {"pi0": "state_proj", "pi05": "time_mlp_in"}


@pytest.fixture
def pi_batch() -> Any:
    return pi0_toys.make_batch()


def observation(policy: Any, batch: Any) -> Any:
    return known_flows.observe(policy, batch).arguments()


def test_shared_prefix_gives_the_unshared_loss_and_gradients(
    pi: str, random_teacher: Path, pi_batch: Any, noise: Tensor, time: Tensor
) -> None:
    results = []
    for share_prefix in ("off", "on"):
        policy = pi0_toys.make_student(random_teacher, share_prefix=share_prefix)
        loss, _ = policy(pi_batch, noise=noise, time=time)
        loss.backward()
        results.append((loss.detach(), reflow_students.gradients(policy)))
    (want, want_grads), (got, got_grads) = results
    assert want > 1e-3
    assert set(got_grads) == set(want_grads)
    assert {name.split(".")[1] for name in got_grads} >= {PROJECTIONS[pi], "action_in_proj", "paligemma_with_expert"}
    torch.testing.assert_close(got, want, rtol=pi0_toys.TOLERANCE, atol=pi0_toys.TOLERANCE)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= pi0_toys.TOLERANCE * grad.norm().clamp_min(1e-3), name


def test_loss_and_gradients_are_stock_lerobots_on_the_teachers_target(
    pi: str, random_teacher: Path, pi_batch: Any, noise: Tensor, time: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = pi0_toys.make_student(random_teacher, share_prefix="off")
    kind = pi0_toys.KINDS[pi]
    stock = kind.policy(kind.config(**pi0_toys.settings())).train()
    stock.load_state_dict(policy.state_dict())
    monkeypatch.setattr(stock.model, "sample_noise", lambda *_: noise)
    monkeypatch.setattr(stock.model, "sample_time", lambda *_: time)
    target = policy.generate_reflow_target(*observation(policy, pi_batch), noise)
    losses = []
    for each, batch in ((stock, {**pi_batch, "action": target}), (policy, pi_batch)):
        given = {} if each is stock else {"noise": noise, "time": time}
        loss, _ = each(batch, reduction="none", **given)
        loss.mean().backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    want, got = reflow_students.gradients(stock), reflow_students.gradients(policy)
    assert want.keys() == got.keys()
    assert all(torch.equal(grad, got[name]) for name, grad in want.items())


@pytest.mark.parametrize("share_prefix", ["off", "on"])
def test_the_target_is_what_stock_lerobot_samples(
    pi: str, random_teacher: Path, pi_batch: Any, noise: Tensor, share_prefix: str
) -> None:
    policy = pi0_toys.make_student(random_teacher, share_prefix=share_prefix, teacher_num_steps=3)
    stock = pi0_toys.KINDS[pi].policy.from_pretrained(random_teacher).eval()
    want = stock.model.sample_actions(*observation(stock, pi_batch), noise=noise, num_steps=3)
    got = policy.generate_reflow_target(*observation(policy, pi_batch), noise)
    # lerobot's sampling also runs VLM and expert separately, with the same operations.
    assert torch.equal(got, want)
    assert (policy.teacher.report().shared_bytes > 0) == (share_prefix == "on")
    assert "gemma_expert.lm_head" in str(stock.state_dict().keys())
    assert "gemma_expert.lm_head" not in str(policy.load_teacher_model().state_dict().keys())


def test_a_student_without_a_teacher_samples_its_own_targets(
    pi: str, random_teacher: Path, pi_batch: Any, noise: Tensor
) -> None:
    policy = pi0_toys.make_student(random_teacher, reflow_target="self", teacher_num_steps=3)
    kind = pi0_toys.KINDS[pi]
    stock = kind.policy(kind.config(**pi0_toys.settings())).eval()
    stock.load_state_dict(policy.state_dict())
    want = stock.model.sample_actions(*observation(stock, pi_batch), noise=noise, num_steps=3)
    assert torch.equal(policy.generate_reflow_target(*observation(policy, pi_batch), noise), want)
    policy(pi_batch, noise=noise)[0].backward()
    assert policy.teacher.why_not_shared is None


@pytest.mark.parametrize("share_prefix", ["on", "off"])
@pytest.mark.sweep(share=0.4)
def test_where_the_teacher_lives_and_when_it_is_copied_changes_nothing(
    random_teacher: Path, pi_batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    results = []
    for mode, schedule in (("resident", "early"), ("swap", "early"), ("swap", "late"), ("stream", "random")):
        flags = {"teacher_offload": mode, "share_prefix": share_prefix}
        policy = pi0_toys.make_student(random_teacher, teacher_num_steps=2, **flags)
        policy.teacher = reflow_teacher.ReflowTeacher(policy.config, AdversarialCopier(schedule))
        results.append(reflow_students.second_step(policy, pi_batch, noise, time))
        assert policy.teacher.report().mode == mode
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_shared_prefix_saves_less(random_teacher: Path, pi_batch: Any) -> None:
    saved = {}
    for share_prefix in ("off", "on"):
        policy = pi0_toys.make_student(random_teacher, share_prefix=share_prefix, teacher_num_steps=1)
        with SavedBytes(policy.parameters()) as count:
            policy(pi_batch)
        saved[share_prefix] = count.total_bytes
    assert saved["on"] < 0.6 * saved["off"]


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("train_expert_only", False, "--policy.train_expert_only=true would freeze it"),
        ("gradient_checkpointing", True, "--policy.gradient_checkpointing=false would not"),
    ],
)
def test_the_setting_that_keeps_it_from_sharing_is_named(
    random_teacher: Path, pi_batch: Any, flag: str, value: bool, reason: str
) -> None:
    policy = pi0_toys.make_student(random_teacher, teacher_num_steps=1, **{flag: value})
    policy(pi_batch)[0].backward()
    assert reason in policy.teacher.why_not_shared
    refused = pi0_toys.make_student(random_teacher, share_prefix="on", **{flag: value})
    with pytest.raises(ValueError, match="share_prefix=on cannot be had"):
        refused(pi_batch)


def test_demonstrations_are_taken_to_their_noise(random_teacher: Path, pi_batch: Any, noise: Tensor) -> None:
    policy = pi0_toys.make_student(random_teacher)
    flow = known_flows.flow_of(policy.config)
    actions = flow.demonstrated_actions(policy, pi_batch)
    assert actions.shape == noise.shape
    assert torch.equal(actions[..., : reflow_students.STATE_DIM], pi_batch["action"])
    assert not actions[..., reflow_students.STATE_DIM :].any()
    model = policy.load_teacher_model().model
    expert = flow.expert(model, flow.prefix(model, known_flows.observe(policy, pi_batch)))
    backwards = torch.tensor([True, False, True, False])
    with torch.no_grad():
        found, ends = expert.couple(noise, actions, backwards, 4, reflow_students.STATE_DIM)
        sampled = expert.sample(noise, 4)
    assert torch.equal(ends[backwards], actions[backwards])
    assert not torch.equal(found[backwards], noise[backwards])
    torch.testing.assert_close(ends[~backwards], sampled[~backwards], rtol=0, atol=pi0_toys.TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_teacher_shares_the_prefix_of_either_student(
    random_teacher: Path, pi_batch: Any, noise: Tensor, time: Tensor, dtype: str
) -> None:
    exact = pi0_toys.make_student(random_teacher, teacher_num_steps=2)
    policy = pi0_toys.make_student(
        random_teacher, teacher_num_steps=2, dtype=dtype, teacher_dtype="bfloat16", share_prefix="on"
    )
    want = exact.generate_reflow_target(*observation(exact, pi_batch), noise)
    got = policy.generate_reflow_target(*observation(policy, pi_batch), noise)
    assert not torch.equal(got, want)
    # bfloat16 has 8 bits: weights and activations are off by up to 0.4 % each, over several layers.
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    expert = policy.load_teacher_model().model.paligemma_with_expert.gemma_expert.model
    assert expert.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    norms = (expert.layers[0].input_layernorm, expert.layers[0].post_attention_layernorm, expert.norm)
    assert {weight.dtype for norm in norms for weight in norm.parameters()} == {torch.float32}
    loss, _ = policy(pi_batch, noise=noise, time=time)
    loss.backward()
    assert loss.isfinite()


def test_weights_that_do_not_fit_are_refused(random_teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(random_teacher, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.action_in_proj.bias"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit its config.json: (.|\n)*Missing key.*action_in_proj.bias"):
        policy_files.load_policy(folder)
    with pytest.raises(RuntimeError, match=r"action_in_proj\.bias"):
        pi0_toys.make_student(folder)


def test_a_model_that_cannot_be_built_names_the_field_of_its_vlm(random_teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(random_teacher, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_resolution": [32, 64]}))
    with pytest.raises(ValueError, match="with paligemma_variant='gemma_2b': PaliGemma expects square"):
        policy_files.load_policy(folder)
