"""The student's loss: exact with and without the shared prefix, and nothing but the loss differs from SmolVLA."""

import copy
import itertools
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.integrations.lerobot.reflow.prefix import ConditionedExpert, SharedPrefix, observe
from hf_memopt.integrations.lerobot.reflow.reflow_teacher import ReflowTeacher
from hf_memopt.memory import SavedBytes
from hf_memopt.recipes.reflow.smolvla_toy import CAMERA, IMAGE_SIZE, POLICY_SETTINGS
from hf_memopt.reflow import sample_time

BATCH, CHUNK, WIDTH, STATE_DIM = 4, 8, 16, 14
SECOND_CAMERA = "observation.images.wrist"
# Rounding: the shared path adds the same float32 numbers in another order (a token's attention over the prefix and
# itself in two parts, the prefix without the action tokens in the same matrix product).
TOLERANCE = 1e-5

Make = Callable[..., SmolVLAReflowPolicy]


def settings(**changes: Any) -> dict[str, Any]:
    image = PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE))
    return {
        **POLICY_SETTINGS,
        "device": "cpu",
        "max_state_dim": WIDTH,
        "max_action_dim": WIDTH,
        "input_features": {
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,)),
            CAMERA: image,
            SECOND_CAMERA: image,
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (STATE_DIM,))},
        **changes,
    }


@pytest.fixture
def make(toy_vlm: Path, tmp_path: Path) -> Make:
    """Makes a teacher's checkpoint and a student whose trained weights have moved away from it."""

    def make(move_state_proj: bool = True, architecture: dict[str, Any] | None = None, **flags: Any):
        torch.manual_seed(0)
        shape = settings(vlm_model_name=str(toy_vlm), **(architecture or {}))
        folder = tmp_path / f"teacher{len(list(tmp_path.iterdir()))}"
        SmolVLAPolicy(SmolVLAConfig(**shape)).save_pretrained(folder)
        config = SmolVLAReflowConfig(
            **{**shape, "use_reflow": True, "teacher_model_path": str(folder), "teacher_offload": "swap", **flags}
        )
        student = SmolVLAReflowPolicy.from_pretrained(folder, config=config)
        for name, parameter in student.named_parameters():
            if parameter.requires_grad and (move_state_proj or "state_proj" not in name):
                parameter.data.add_(0.05 * torch.randn_like(parameter))
        return student.train()

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    masks = torch.ones(BATCH, 5, dtype=torch.bool)
    masks[1, 3:] = False
    return {
        "observation.state": torch.randn(BATCH, STATE_DIM, generator=generator),
        CAMERA: torch.rand(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        SECOND_CAMERA: torch.rand(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        f"{SECOND_CAMERA}_padding_mask": torch.tensor([True, False, True, True]),
        "observation.language.tokens": torch.randint(7, 290, (BATCH, 5), generator=generator),
        "observation.language.attention_mask": masks,
        "action": torch.randn(BATCH, CHUNK, STATE_DIM, generator=generator),
    }


@pytest.fixture
def noise() -> Tensor:
    return torch.randn(BATCH, CHUNK, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def time() -> Tensor:
    return torch.tensor([0.05, 0.4, 0.8, 1.0])


def gradients(policy: SmolVLAReflowPolicy) -> dict[str, Tensor]:
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def target(policy: SmolVLAReflowPolicy, batch: dict[str, Tensor], noise: Tensor) -> Tensor:
    return policy.generate_reflow_target(*observe(policy, batch).arguments(), noise)


def stock_target(policy: SmolVLAReflowPolicy, batch: dict[str, Tensor], noise: Tensor, **changes: Any) -> Tensor:
    """What the teacher's own checkpoint samples in stock lerobot, never offloaded."""
    teacher = SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    for name, value in changes.items():
        setattr(teacher.config, name, value)
    return teacher.model.sample_actions(*observe(policy, batch).arguments(), noise=noise).detach()


# ------------------------------------------------------------------------------------------------ the shared prefix


@pytest.mark.parametrize("train_state_proj", [True, False])
@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"attention_mode": "self_attn"},
        {"add_image_special_tokens": True},
        {"self_attn_every_n_layers": 3},
        {"empty_cameras": 1},
    ],
    ids=lambda architecture: next(iter(architecture), "default"),
)
def test_shared_prefix_gives_the_unshared_loss_and_gradients(
    make: Make, batch: Any, noise: Tensor, time: Tensor, architecture: dict[str, Any], train_state_proj: bool
) -> None:
    results = []
    for share_prefix in ("off", "on"):
        policy = make(train_state_proj, architecture, share_prefix=share_prefix, train_state_proj=train_state_proj)
        loss, _ = policy(batch, noise=noise, time=time)
        loss.backward()
        results.append((loss.detach(), gradients(policy)))
    (want, want_grads), (got, got_grads) = results
    assert want > 1e-3
    assert set(got_grads) == set(want_grads)
    assert any("state_proj" in name for name in got_grads) == train_state_proj
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= TOLERANCE * grad.norm().clamp_min(1e-3), name


def test_shared_prefix_does_not_depend_on_copy_timing(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    results = []
    for schedule in ("early", "late", "random"):
        policy = make()
        policy._teacher = ReflowTeacher(policy.config, AdversarialCopier(schedule))
        for _ in range(2):
            policy.zero_grad()
            loss, _ = policy(batch, noise=noise, time=time)
            loss.backward()
            policy.update()
        results.append([loss.detach(), *gradients(policy).values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_shared_prefix_saves_less_and_the_state_token_little_more(make: Make, batch: Any) -> None:
    saved = {}
    for share_prefix, train_state_proj in itertools.product(("off", "on"), (True, False)):
        policy = make(train_state_proj, share_prefix=share_prefix, train_state_proj=train_state_proj)
        with SavedBytes(policy.parameters()) as count:
            policy(batch)
        saved[share_prefix, train_state_proj] = count.total_bytes
    assert saved["on", False] < 0.6 * saved["off", False]
    assert saved["on", True] < 0.65 * saved["off", True]


def test_a_prefix_serves_one_graph(make: Make, batch: Any) -> None:
    policy = make()
    prefix = SharedPrefix(policy.model, observe(policy, batch))
    ConditionedExpert(policy.model, prefix)
    with torch.no_grad():
        ConditionedExpert(policy.model, prefix)
    with pytest.raises(RuntimeError, match="one backward pass"):
        ConditionedExpert(policy.model, prefix)


def test_two_forwards_in_flight_and_a_retained_graph(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    policy(batch, noise=noise, time=time)[0].backward()
    once = {name: grad.clone() for name, grad in gradients(policy).items()}
    policy.zero_grad()
    first, _ = policy(batch, noise=noise, time=time)
    policy(batch, noise=-noise, time=time)
    first.backward(retain_graph=True)
    assert all(torch.equal(grad, once[name]) for name, grad in gradients(policy).items())
    first.backward()
    assert all(torch.equal(grad, 2 * once[name]) for name, grad in gradients(policy).items())


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
    assert policy.teacher_report().shared_bytes == 0


def test_another_vlm_is_an_obstacle_and_on_refuses_it(make: Make) -> None:
    policy = make(share_prefix="on")
    name, weight = next(iter(policy.model.vlm_with_expert.vlm.named_parameters()))
    weight.data.view(-1)[0] += 1e-3
    with pytest.raises(ValueError, match=f"share_prefix=on cannot be had: .*{name}.*prepare-student"):
        policy.load_teacher_model()


# ------------------------------------------------------------------------------------------------ the target


@pytest.mark.parametrize("mode", ["resident", "swap", "auto"])
def test_target_is_bitwise_the_stock_teachers(make: Make, batch: Any, noise: Tensor, mode: str) -> None:
    policy = make(share_prefix="off", teacher_offload=mode)
    want = stock_target(policy, batch, noise)
    assert torch.equal(target(policy, batch, noise), want)
    assert torch.equal(target(policy, batch, noise), want)


@pytest.mark.parametrize("mode", ["resident", "swap"])
def test_shared_target_is_the_stock_teachers_up_to_rounding(make: Make, batch: Any, noise: Tensor, mode: str) -> None:
    policy = make(share_prefix="on", teacher_offload=mode)
    got = target(policy, batch, noise)
    torch.testing.assert_close(got, stock_target(policy, batch, noise), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(got, target(policy, batch, noise))


def test_modes_agree_bitwise_with_a_shared_prefix(make: Make, batch: Any, noise: Tensor) -> None:
    targets = [target(make(share_prefix="on", teacher_offload=mode), batch, noise) for mode in ("resident", "swap")]
    assert torch.equal(*targets)


def test_teacher_num_steps_sets_the_solver(make: Make, batch: Any, noise: Tensor) -> None:
    policy = make(share_prefix="off", teacher_num_steps=3)
    assert torch.equal(target(policy, batch, noise), stock_target(policy, batch, noise, num_steps=3))


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_bf16_teacher_is_near_and_keeps_buffers_and_projections(
    make: Make, batch: Any, noise: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix, teacher_dtype="bfloat16")
    error = (target(policy, batch, noise) - stock_target(policy, batch, noise)).square().mean().sqrt()
    assert 0 < error < 0.05
    model = policy.load_teacher_model().model
    assert {p.dtype for p in model.vlm_with_expert.lm_expert.parameters()} == {torch.bfloat16}
    vlm_dtype = torch.float32 if share_prefix == "on" else torch.bfloat16
    assert {p.dtype for p in model.vlm_with_expert.vlm.parameters()} == {vlm_dtype}
    assert model.action_out_proj.weight.dtype == torch.float32
    assert not any(buffer.dtype == torch.bfloat16 for buffer in model.buffers())


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_right_after_a_fault_in_any_copy(
    make: Make, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix)
    want, _ = policy(batch, noise=noise, time=time)
    for fail_at in range(1, 7):
        policy._teacher = ReflowTeacher(policy.config, AdversarialCopier("late", fail_at=fail_at))
        losses = []
        for _ in range(3):
            try:
                losses.append(policy(batch, noise=noise, time=time)[0])
            except InjectedError:
                losses.append(None)
        assert losses.count(None) == 1
        assert all(torch.equal(loss, want) for loss in losses if loss is not None)
        assert policy.teacher_report().device_bytes == 0


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
    for countdown in range(1, 11):  # each of the ten Euler steps  # noqa: B007
        with pytest.raises(torch.OutOfMemoryError):
            policy(batch, noise=noise, time=time)
        assert policy.teacher_report().device_bytes == 0
        assert torch.equal(policy(batch, noise=noise, time=time)[0], want)


# ------------------------------------------------------------------------------------------------ the loss


def test_loss_is_the_stock_loss_on_the_teachers_actions(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make(share_prefix="off")
    actions = stock_target(policy, batch, noise)
    losses = policy.model.forward(*observe(policy, batch).arguments(), actions, noise, time)[..., :STATE_DIM]
    loss, info = policy(batch, noise=noise, time=time)
    torch.testing.assert_close(loss, losses.mean())
    assert info["loss"] == loss.item()


def test_without_use_reflow_it_is_smolvla(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    policy.config.use_reflow = False
    stock = SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    stock.load_state_dict(policy.state_dict())
    assert torch.equal(policy(batch, noise=noise, time=time)[0], stock(batch, noise=noise, time=time)[0])
    assert policy.teacher_report() is None


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_reduction_none_gives_one_loss_per_sample(
    make: Make, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix)
    losses, _ = policy(batch, noise=noise, time=time, reduction="none")
    assert losses.shape == (BATCH,)
    assert torch.equal(losses.mean(), policy(batch, noise=noise, time=time)[0])
    single = {key: value[2:3] for key, value in batch.items()}
    alone, _ = policy(single, noise=noise[2:3], time=time[2:3])
    torch.testing.assert_close(losses[2], alone, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("adapt_to_pi_aloha", [True, False])
def test_the_batch_is_not_modified(
    make: Make, batch: Any, noise: Tensor, time: Tensor, adapt_to_pi_aloha: bool
) -> None:
    batch["observation.state"] = batch["observation.state"].abs() * 0.01 + 0.03  # gripper positions in their range
    policy = make(architecture={"adapt_to_pi_aloha": adapt_to_pi_aloha})
    before = {key: value.clone() for key, value in batch.items()}
    first, _ = policy(batch, noise=noise, time=time)
    assert set(batch) == set(before)
    assert all(torch.equal(batch[key], before[key]) for key in before)
    assert torch.equal(policy(batch, noise=noise, time=time)[0], first)


def test_pi_aloha_conditions_both_models_on_the_converted_state(make: Make, batch: Any, noise: Tensor) -> None:
    batch["observation.state"] = batch["observation.state"].abs() * 0.01 + 0.03
    policy = make(architecture={"adapt_to_pi_aloha": True}, share_prefix="off")
    teacher = SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    copied = {key: value.clone() for key, value in batch.items()}
    want = teacher.predict_action_chunk(copied, noise=noise)
    got = policy._pi_aloha_encode_actions(target(policy, batch, noise)[..., :STATE_DIM])
    assert torch.equal(got, want)


@pytest.mark.parametrize("sampling", ["beta", "uniform", "ushaped", "one"])
def test_one_draw_of_noise_and_time_and_nothing_else_touches_the_generator(
    make: Make, batch: Any, sampling: str
) -> None:
    policy = make(reflow_time_sampling=sampling)
    torch.manual_seed(5)
    loss, _ = policy(batch)  # loads the teacher on the way
    after = torch.get_rng_state()
    torch.manual_seed(5)
    noise = policy.model.sample_noise((BATCH, CHUNK, WIDTH), "cpu")
    time = sample_time(BATCH, sampling)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(policy(batch, noise=noise, time=time)[0], loss)


def test_evaluation_without_gradients_gives_the_same_loss(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    loss, _ = policy(batch, noise=noise, time=time)
    policy.eval()
    with torch.no_grad():
        torch.testing.assert_close(policy(batch, noise=noise, time=time)[0], loss.detach(), rtol=TOLERANCE, atol=0)


# ------------------------------------------------------------------------------------------------ invisibility


def test_checkpoints_hold_the_students_keys_and_inference_needs_no_teacher(
    make: Make, batch: Any, noise: Tensor, tmp_path: Path
) -> None:
    policy = make()
    policy(batch)
    policy.save_pretrained(tmp_path / "student")
    teacher_keys = set(load_file(Path(policy.config.teacher_model_path) / "model.safetensors"))
    assert set(load_file(tmp_path / "student" / "model.safetensors")) == teacher_keys
    policy.config.teacher_model_path = str(tmp_path / "gone")
    policy.save_pretrained(tmp_path / "orphan")
    orphan = SmolVLAReflowPolicy.from_pretrained(tmp_path / "orphan")
    want = policy.predict_action_chunk(dict(batch), noise=noise)
    assert torch.equal(orphan.predict_action_chunk(dict(batch), noise=noise), want)
    with pytest.raises(ValueError, match=r"gone.*neither a checkpoint folder nor a hub id"):
        orphan(batch)


def test_training_modes_moves_and_gradients_do_not_reach_the_teacher(make: Make, batch: Any, noise: Tensor) -> None:
    policy = make(share_prefix="off")
    before = target(policy, batch, noise)
    num_tensors = len(policy.state_dict())
    policy.train()
    policy(batch)[0].backward()
    teacher = policy.load_teacher_model()
    assert not any(module.training for module in teacher.model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    policy.to(torch.float64)
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    policy.to(torch.float32)
    assert torch.equal(target(policy, batch, noise), before)
    assert len(policy.state_dict()) == num_tensors
    assert not any("teacher" in name for name, _ in itertools.chain(policy.named_modules(), policy.named_parameters()))


def test_copies_and_pickles_carry_no_teacher_and_can_train(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    loss, _ = policy(batch, noise=noise, time=time)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin.teacher_report() is None
        assert torch.equal(twin(batch, noise=noise, time=time)[0], loss)
        assert twin.load_teacher_model() is not policy.load_teacher_model()
        assert twin._teacher._config is twin.config


def test_update_prefetches_and_the_next_step_uses_it(make: Make, batch: Any) -> None:
    policy = make()
    policy.update()  # before the first step there is nothing to fetch
    policy(batch)
    report = policy.teacher_report()
    policy.update()
    assert policy.teacher_report().device_bytes == report.host_bytes
    policy(batch)
    after = policy.teacher_report()
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
    report = policy.teacher_report()
    assert own + buffers <= report.host_bytes <= own + buffers + 256 * num_tensors
    ours = dict(policy.model.vlm_with_expert.vlm.named_parameters())
    assert all(weight.data_ptr() == ours[name].data_ptr() for name, weight in vlm.named_parameters())


@pytest.mark.parametrize("train_state_proj", [True, False])
def test_autocast_is_as_exact_with_a_shared_prefix_as_without(
    make: Make, batch: Any, noise: Tensor, time: Tensor, train_state_proj: bool
) -> None:
    exact, _ = make(share_prefix="off")(batch, noise=noise, time=time)
    losses = {}
    for share_prefix in ("off", "on"):
        policy = make(share_prefix=share_prefix, train_state_proj=train_state_proj)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses[share_prefix], _ = policy(batch, noise=noise, time=time)
        losses[share_prefix].backward()
        assert all(grad.isfinite().all() for grad in gradients(policy).values())
    # bf16 has 8 bits: both paths are off by its rounding, neither by more.
    assert abs(losses["on"] - exact) < 0.02 * exact
    assert abs(losses["off"] - exact) < 0.02 * exact


def test_a_student_in_bf16_shares_a_checkpoint_that_was_saved_in_bf16(make: Make, batch: Any) -> None:
    policy = make()
    file = Path(policy.config.teacher_model_path) / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file)
    vlm = policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    policy.load_teacher_model()
    assert policy.sharing_obstacle is None
    assert next(vlm.parameters()).dtype == torch.bfloat16
    assert policy(batch)[0].isfinite()


def test_yaml_may_say_off_without_quotes(make: Make) -> None:
    assert make(share_prefix=str(False)).config.share_prefix == "off"
    with pytest.raises(ValueError, match="share_prefix='maybe' is unknown"):
        make(share_prefix="maybe")
