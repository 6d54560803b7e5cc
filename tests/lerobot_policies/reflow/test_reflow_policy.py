"""Tests of the student's loss: exact with and without the shared prefix, the only difference from SmolVLA."""

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.reflow import sample_time

configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
reflow_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
configs = LateModule("lerobot.configs")
configuration_smolvla = LateModule("lerobot.policies.smolvla.configuration_smolvla")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
reflow_students = LateModule("reflow_students")


Make = Callable[..., Any]


def test_two_forwards_in_flight_and_a_retained_graph(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    policy(batch, noise=noise, time=time)[0].backward()
    once = {name: grad.clone() for name, grad in reflow_students.gradients(policy).items()}
    policy.zero_grad()
    first, _ = policy(batch, noise=noise, time=time)
    policy(batch, noise=-noise, time=time)
    first.backward(retain_graph=True)
    assert all(torch.equal(grad, once[name]) for name, grad in reflow_students.gradients(policy).items())
    first.backward()
    assert all(torch.equal(grad, 2 * once[name]) for name, grad in reflow_students.gradients(policy).items())


def test_loss_is_the_stock_loss_on_the_teachers_actions(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make(share_prefix="off")
    actions = reflow_students.stock_target(policy, batch, noise)
    losses = policy.model.forward(*known_flows.observe(policy, batch).arguments(), actions, noise, time)[
        ..., : reflow_students.STATE_DIM
    ]
    loss, info = policy(batch, noise=noise, time=time)
    torch.testing.assert_close(loss, losses.mean())
    assert info["loss"] == loss.item()


def test_without_use_reflow_it_is_smolvla(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    policy.config.use_reflow = False
    stock = modeling_smolvla.SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    stock.load_state_dict(policy.state_dict())
    (loss, figures), (want, stock_figures) = (each(batch, noise=noise, time=time) for each in (policy, stock))
    assert torch.equal(loss, want)
    assert figures == {**stock_figures, **policy.memory_figures()}
    loss.backward()
    policy.update()
    phases = ("forward", "backward", "optimizer")
    assert list(policy.memory_figures()) == [f"memory/{phase}_host_rss_gib" for phase in phases]
    assert policy.teacher.report() is None


WAYS = {
    "shared": {"share_prefix": "on"},
    "bf16": {"share_prefix": "on", "dtype": "bfloat16"},
    "not shared": {"share_prefix": "off"},
    "all of SmolVLA": {"use_reflow": False, "train_expert_only": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{"mode": "all"}, {"mode": "auto"}, {"mode": "auto", "budget_gib": 0.0005}], ids=str
)
@pytest.mark.usefixtures("quick_plans")
@pytest.mark.sweep(share=0.25)
def test_offloaded_activations_give_the_same_gradients(
    way: str, options: dict[str, Any], make: Make, batch: Any, noise: Tensor, time: Tensor
) -> None:
    """Compare recorded steps and planned steps."""
    policy = make(**WAYS[way])
    plain, _ = policy(batch, noise=noise, time=time)
    plain.backward()
    want = {name: grad.clone() for name, grad in reflow_students.gradients(policy).items()}
    policy.offloader = ActivationOffloader(offload_threshold_mb=0.001, copier=SyncCopier(), **options)
    for _ in range(4):
        policy.zero_grad()
        loss, figures = policy(batch, noise=noise, time=time)
        assert figures["memory/offload_host_gib"] == policy.offloader.stats.host_bytes_pinned / 2**30
        loss.backward()
        assert torch.equal(loss, plain)
        got = reflow_students.gradients(policy)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    stats = policy.offloader.stats
    assert stats.bytes_moved > 0
    if "budget_gib" in options:
        assert stats.measured_peak_gib <= options["budget_gib"]
    assert stats.host_bytes_pinned > 0


@pytest.mark.parametrize(
    ("flags", "enabled", "mode", "budget"),
    [
        ({}, False, "auto", None),
        ({"activation_offload": "all"}, True, "all", None),
        ({"activation_offload": "auto", "activation_budget_gib": 2.0}, True, "auto", 2.0),
    ],
)
def test_flags_switch_offloading_on_in_copies_too(
    flags: dict[str, Any], enabled: bool, mode: str, budget: float | None, make: Make
) -> None:
    policy = make(**flags)
    for offloader in (policy.offloader, copy.deepcopy(policy).offloader):
        assert (offloader.enabled, offloader.mode, offloader._options["budget_gib"]) == (enabled, mode, budget)


def test_a_disk_is_the_training_machines(make: Make, tmp_path: Path) -> None:
    policy = make(activation_offload="all", activation_disk=str(tmp_path / "elsewhere"))
    assert policy.offloader._options["disk"] is None


@pytest.mark.parametrize("use_reflow", [True, False])
def test_dtype_is_the_policys_own_autocast(
    use_reflow: bool, make: Make, batch: Any, noise: Tensor, time: Tensor
) -> None:
    """Check casts in any loop, and no change in a loop that casts too."""
    policy = make()
    policy.config.use_reflow = use_reflow
    with torch.autocast("cpu", torch.bfloat16):
        want, _ = policy(batch, noise=noise, time=time)
    plain, _ = policy(batch, noise=noise, time=time)
    assert not torch.equal(plain, want)
    policy.config.dtype = "bfloat16"
    assert torch.equal(policy(batch, noise=noise, time=time)[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy(batch, noise=noise, time=time)[0], want)


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_reduction_none_gives_one_loss_per_sample(
    make: Make, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    policy = make(share_prefix=share_prefix)
    losses, _ = policy(batch, noise=noise, time=time, reduction="none")
    assert losses.shape == (reflow_students.BATCH,)
    assert torch.equal(losses.mean(), policy(batch, noise=noise, time=time)[0])
    single = {key: value[2:3] for key, value in batch.items()}
    alone, _ = policy(single, noise=noise[2:3], time=time[2:3])
    torch.testing.assert_close(losses[2], alone, rtol=reflow_students.TOLERANCE, atol=reflow_students.TOLERANCE)


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


@pytest.mark.parametrize("sampling", ["beta", "uniform", "ushaped", "one"])
def test_one_draw_of_noise_and_time_and_nothing_else_touches_the_generator(
    make: Make, batch: Any, sampling: str
) -> None:
    policy = make(reflow_time_sampling=sampling)
    torch.manual_seed(5)
    loss, _ = policy(batch)  # the forward loads the teacher
    after = torch.get_rng_state()
    torch.manual_seed(5)
    noise = policy.model.sample_noise((reflow_students.BATCH, reflow_students.CHUNK, reflow_students.WIDTH), "cpu")
    time = sample_time(reflow_students.BATCH, sampling)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(policy(batch, noise=noise, time=time)[0], loss)


def test_evaluation_without_gradients_gives_the_same_loss(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    loss, _ = policy(batch, noise=noise, time=time)
    policy.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            policy(batch, noise=noise, time=time)[0], loss.detach(), rtol=reflow_students.TOLERANCE, atol=0
        )


def test_training_modes_moves_and_gradients_do_not_reach_the_teacher(make: Make, batch: Any, noise: Tensor) -> None:
    policy = make(share_prefix="off")
    before = reflow_students.target(policy, batch, noise)
    num_tensors = len(policy.state_dict())
    policy.train()
    policy(batch)[0].backward()
    teacher = policy.load_teacher_model()
    assert not any(module.training for module in teacher.model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    policy.to(torch.float64)
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    policy.to(torch.float32)
    assert torch.equal(reflow_students.target(policy, batch, noise), before)
    assert len(policy.state_dict()) == num_tensors
    assert not any("teacher" in name for name, _ in itertools.chain(policy.named_modules(), policy.named_parameters()))


def test_copies_and_pickles_carry_no_teacher_and_can_train(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    policy = make()
    loss, _ = policy(batch, noise=noise, time=time)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin.teacher.report() is None
        assert torch.equal(twin(batch, noise=noise, time=time)[0], loss)
        assert twin.load_teacher_model() is not policy.load_teacher_model()
        assert twin.teacher._config is twin.config
