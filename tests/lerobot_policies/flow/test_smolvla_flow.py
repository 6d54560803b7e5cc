import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from late_imports import LateModule
from torch import Tensor

from hf_memopt.memory import SavedBytes

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
smolvla_flow = LateModule("hf_memopt.lerobot.flow.smolvla_flow")
reflow_teacher = LateModule("hf_memopt.lerobot.reflow.teachers")
reflow_students = LateModule("reflow_students")


Make = Callable[..., Any]


@pytest.mark.parametrize("train_state_proj", [True, pytest.param(False, marks=pytest.mark.slow)])
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
@pytest.mark.sweep(share=0.4)
def test_shared_prefix_gives_the_unshared_loss_and_gradients(
    make: Make,
    batch: Any,
    noise: Tensor,
    time: Tensor,
    architecture: dict[str, Any],
    train_state_proj: bool,
) -> None:
    results = []
    for share_prefix in ("off", "on"):
        policy = make(train_state_proj, architecture, share_prefix=share_prefix, train_state_proj=train_state_proj)
        loss, _ = policy(batch, noise=noise, time=time)
        loss.backward()
        results.append((loss.detach(), reflow_students.gradients(policy)))
    (want, want_grads), (got, got_grads) = results
    assert want > 1e-3
    assert set(got_grads) == set(want_grads)
    assert any("state_proj" in name for name in got_grads) == train_state_proj
    torch.testing.assert_close(got, want, rtol=reflow_students.TOLERANCE, atol=reflow_students.TOLERANCE)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= reflow_students.TOLERANCE * grad.norm().clamp_min(1e-3), name


def test_shared_prefix_does_not_depend_on_copy_timing(make: Make, batch: Any, noise: Tensor, time: Tensor) -> None:
    results = []
    for schedule in ("early", "late", "random"):
        policy = make()
        policy.teacher = reflow_teacher.ReflowTeacher(policy.config, AdversarialCopier(schedule))
        results.append(reflow_students.second_step(policy, batch, noise, time))
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
    prefix = smolvla_flow.SmolVLAPrefix(policy.model, known_flows.observe(policy, batch))
    smolvla_flow.SmolVLAExpert(policy.model, prefix)
    with torch.no_grad():
        smolvla_flow.SmolVLAExpert(policy.model, prefix)
    with pytest.raises(RuntimeError, match="one backward pass"):
        smolvla_flow.SmolVLAExpert(policy.model, prefix)


@pytest.mark.parametrize("train_state_proj", [True, False])
def test_autocast_is_as_exact_with_a_shared_prefix_as_without(
    make: Make, batch: Any, noise: Tensor, time: Tensor, train_state_proj: bool
) -> None:
    exact, _ = make(share_prefix="off", train_state_proj=train_state_proj)(batch, noise=noise, time=time)
    losses = {}
    for share_prefix in ("off", "on"):
        policy = make(share_prefix=share_prefix, train_state_proj=train_state_proj)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses[share_prefix], _ = policy(batch, noise=noise, time=time)
        losses[share_prefix].backward()
        assert all(grad.isfinite().all() for grad in reflow_students.gradients(policy).values())
    # bf16 has 8 bits: both paths are off by no more than its rounding.
    assert abs(losses["on"] - exact) < 0.02 * exact
    assert abs(losses["off"] - exact) < 0.02 * exact
