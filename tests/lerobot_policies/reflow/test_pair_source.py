"""Tests of demonstrations, a robust loss, rounds, and a student as teacher."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

from hf_memopt.reflow import chunk_loss

measure = LateModule("hf_memopt.lerobot.evaluate.measure")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
pair_source = LateModule("hf_memopt.lerobot.reflow.pair_source")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
lerobot_runs = LateModule("lerobot_runs")


DIMS = 2  # dimensions of the toy's actions; the model pads them to 4


@pytest.fixture
def batch(toy_teacher: Path, toy_dataset: Path) -> dict[str, Any]:
    """Six frames, some of whose chunks reach past the end of the episode."""
    (found,) = measure.held_out_batches(toy_teacher, toy.REPO_ID, toy_dataset, [2], batch_size=6, max_observations=6)
    return found


@pytest.fixture
def noise() -> Tensor:
    return torch.randn(6, 6, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def time() -> Tensor:
    return torch.linspace(0.1, 1, 6)


def load(folder: Path, **changes: Any) -> Any:
    config = dataclasses.replace(policy_files.load_config(folder), device="cpu", **changes)
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(folder, config=config).train()
    generator = torch.Generator().manual_seed(0)
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return student


# ------------------------------------------------------------------------------------------------ the loss


def test_mse_is_the_mean_over_what_counts() -> None:
    squared = torch.arange(24.0).reshape(2, 4, 3)
    assert torch.equal(chunk_loss(squared), squared.mean(dim=(1, 2)))
    valid = torch.tensor([[True, True, False, False], [True, True, True, True]])
    torch.testing.assert_close(
        chunk_loss(squared, "mse", valid), torch.stack([squared[0, :2].mean(), squared[1].mean()])
    )
    assert chunk_loss(squared, "mse", torch.zeros(2, 4, dtype=torch.bool)).tolist() == [0, 0]


def test_huber_is_quadratic_near_zero_and_a_norm_far_away() -> None:
    count, threshold = 12, 0.00054 * 12
    for size, want in ((1e-5, 1e-10 * count / (2 * threshold * count)), (1e3, 1e3 * count**0.5 / count)):
        loss = chunk_loss(torch.full((1, 4, 3), size**2, dtype=torch.float64), "huber")
        assert loss.item() == pytest.approx(want, rel=1e-3)
    error = torch.zeros(1, 4, 3, requires_grad=True)
    chunk_loss(error.square(), "huber").sum().backward()
    assert error.grad.isfinite().all()
    with pytest.raises(ValueError, match="reflow_loss='l1' is unknown; use one of mse, huber"):
        chunk_loss(torch.zeros(1, 1, 1), "l1")


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_the_flag_changes_the_loss(
    toy_student: Path, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    policy = load(toy_student, share_prefix=share_prefix, reflow_loss="huber")
    losses, _ = policy(batch, noise=noise, time=time, reduction="none")
    policy.config.reflow_loss = "mse"
    squared, _ = policy(batch, noise=noise, time=time, reduction="none")
    num_elements = 6 * DIMS
    threshold = 0.00054 * num_elements
    want = ((squared * num_elements + threshold**2).sqrt() - threshold) / num_elements
    torch.testing.assert_close(losses, want)


# ------------------------------------------------------------------------------------------------ demonstrations


def test_a_path_taken_back_leads_to_where_it_came_from(toy_student: Path, batch: Any, noise: Tensor) -> None:
    """Check for the path's own noise, with Euler's error of first order in the step."""
    policy = load(toy_student)
    flow = known_flows.flow_of(policy.config)
    model, observation = policy.model, known_flows.observe(policy, batch)
    forwards, backwards = torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)
    distances = []
    with torch.no_grad():
        expert = flow.expert(model, flow.prefix(model, observation))
        for steps in (10, 40):
            same, actions = expert.couple(noise, torch.zeros_like(noise), forwards, steps, 4)
            torch.testing.assert_close(actions, expert.sample(noise, steps), rtol=1e-5, atol=1e-5)
            assert torch.equal(same, noise)
            found, kept = expert.couple(noise, actions, backwards, steps, 4)
            assert torch.equal(kept, actions)
            distances.append((found - noise).square().mean().sqrt().item())
    assert distances[1] < 0.4 * distances[0] < 0.2


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_demonstrations_keep_their_actions_and_get_their_noise(
    toy_student: Path, batch: Any, noise: Tensor, share_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(toy_student, reflow_real_data=0.5, share_prefix=share_prefix, teacher_offload="swap")
    policy.load_teacher_model()
    observation = known_flows.observe(policy, batch)
    chosen = torch.tensor([True, False, True, False, False, True])
    monkeypatch.setattr(torch, "rand", lambda *_: torch.where(chosen, 0.0, 0.9))
    source = policy.pair_source
    prefix = policy.teacher.shared_prefix(policy, observation)
    drawn = source.draw(policy, batch, noise)
    _, found, target, valid, at_start = source.complete(drawn, policy, observation, prefix)
    assert torch.equal(target[chosen], known_flows.flow_of(policy.config).demonstrated_actions(policy, batch)[chosen])
    assert torch.equal(found[~chosen], noise[~chosen])
    # Padded dimensions keep the drawn noise; the robot's dimensions get the noise from which the actions come.
    torch.testing.assert_close(found[chosen][..., DIMS:], noise[chosen][..., DIMS:], rtol=1e-5, atol=1e-5)
    assert (found[chosen][..., :DIMS] - noise[chosen][..., :DIMS]).abs().max() > 0.1
    solved = policy.teacher.sample(observation, noise, prefix)
    torch.testing.assert_close(target[~chosen], solved[~chosen], rtol=1e-4, atol=1e-4)
    assert torch.equal(valid, ~(batch["action_is_pad"] & chosen[:, None]))
    assert not valid.all()
    assert at_start is None
    assert policy.teacher.report().device_bytes == 0


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_steps_behind_the_end_of_an_episode_do_not_count(
    toy_student: Path, batch: Any, noise: Tensor, share_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check at time 1, where the input is noise alone and actions enter only through the loss."""
    policy = load(toy_student, share_prefix=share_prefix)
    policy.load_teacher_model()
    padding = batch["action_is_pad"]
    assert padding.any()
    losses = []
    for valid in (~padding, None):
        for filler in (0.0, 7.0):
            pairs = pair_source.Pairs(batch, noise, torch.where(padding[..., None], filler, noise), valid)
            monkeypatch.setattr(policy.pair_source, "complete", lambda *_, pairs=pairs: pairs)
            losses.append(policy(batch, noise=noise, time=torch.ones(6))[0])
    assert losses[0] == losses[1]
    assert losses[2] != losses[3]


# ------------------------------------------------------------------------------------------------ without a teacher


@pytest.mark.parametrize("share_prefix", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_student_teaches_itself(
    toy_student: Path, batch: Any, noise: Tensor, time: Tensor, share_prefix: str
) -> None:
    """Compare with a copy of the student as the teacher, before and after a step."""
    policy = load(toy_student, reflow_target="self", teacher_num_steps=10, share_prefix=share_prefix)
    for _ in range(2):
        twin = copy.deepcopy(policy)
        want = twin.eval().model.sample_actions(*known_flows.observe(twin, batch).arguments(), noise=noise)
        got = policy.generate_reflow_target(*known_flows.observe(policy, batch).arguments(), noise)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not got.requires_grad
        with policy.teacher.visit() as model:
            assert not model.training
        loss, figures = policy(batch, noise=noise, time=time)
        loss.backward()
        assert "memory/teacher_own_gib" not in figures
        torch.optim.SGD([p for p in policy.parameters() if p.grad is not None], lr=0.1).step()
        policy.zero_grad()
    assert policy.training
    assert policy.teacher.report() is None
    assert pickle.loads(pickle.dumps(policy)).load_teacher_model() is not policy


def test_own_pairs_are_demonstrations_at_all_times_and_own_samples_at_the_start(
    toy_student: Path, batch: Any, noise: Tensor, time: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(toy_student, reflow_target="self", share_prefix="on")
    drawn: list[Any] = []

    class Watched(pair_source.OwnPairs):  # type: ignore[misc]
        def complete(self, *arguments: Any) -> Any:
            drawn.append(super().complete(*arguments))
            return drawn[-1]

    policy.pair_source = Watched()
    losses = policy._losses
    times: list[Tensor] = []
    monkeypatch.setattr(policy, "_losses", lambda *given: (times.append(given[-1]), losses(*given))[1])
    torch.manual_seed(0)
    policy(batch, noise=noise, time=time)
    (pairs,) = drawn
    own = policy.generate_reflow_target(*known_flows.observe(policy, batch).arguments(), noise)
    actions = known_flows.flow_of(policy.config).demonstrated_actions(policy, batch)
    assert set(pairs.at_start.tolist()) == {True, False}
    assert torch.equal(pairs.noise, noise)
    assert torch.equal(pairs.target, torch.where(pairs.at_start[:, None, None], own, actions))
    assert torch.equal(times[0], torch.where(pairs.at_start, 1.0, time))
    assert torch.equal(pairs.valid, pairs.at_start[:, None] | ~batch["action_is_pad"])


def test_a_student_that_teaches_itself_trains_with_demonstrations(
    toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    log = lerobot_runs.run(reflow_smolvla.main, *flags, "--policy.reflow_target=self")
    assert "shared prefix: on" in log
    assert "Teacher Model: none" in diagnosis.diagnose(str(tmp_path / "run"), "cpu")


# ------------------------------------------------------------------------------------------------ rounds, settings


def test_the_next_round_starts_from_the_last_ones_student(toy_student: Path, tmp_path: Path) -> None:
    assert policy_files.load_config(toy_student).reflow_round == 1
    second = policy_files.load_config(prepare.prepare_student(str(toy_student), tmp_path / "second"))
    assert second.reflow_round == 2
    assert second.teacher_model_path == str(toy_student)
    assert (
        policy_files.load_config(prepare.prepare_student(str(tmp_path / "second"), tmp_path / "third")).reflow_round
        == 3
    )
