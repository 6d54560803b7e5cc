"""Tests of the comparison of student and teacher on cases with known answers, and of its side effects."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

measure = LateModule("hf_memopt.lerobot.evaluate.measure")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


pytestmark = pytest.mark.usefixtures("quick_evaluation")


@pytest.fixture
def batches(toy_teacher: Path, toy_dataset: Path) -> list[dict[str, Any]]:
    return measure.held_out_batches(toy_teacher, toy.REPO_ID, toy_dataset, [2, 3], batch_size=8, max_observations=10)


@pytest.fixture
def noise(batches: list[dict[str, Any]]) -> Tensor:
    return torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))


def test_held_out_batches_are_preprocessed_and_spread_over_the_episodes(batches: list[dict[str, Any]]) -> None:
    assert [len(batch["action"]) for batch in batches] == [8, 2]
    assert batches[0]["action"].shape == (8, 6, 2)
    assert {int(episode) for batch in batches for episode in batch["episode_index"]} == {2, 3}
    frames = [int(frame) for batch in batches for frame in batch["index"]]
    assert (frames[0], frames[-1]) == (12, 23)  # the last two of four episodes of 6 frames each
    assert batches[0]["observation.language.tokens"].ndim == 2


def test_an_episode_that_there_is_not_is_named(toy_teacher: Path, toy_dataset: Path) -> None:
    with pytest.raises(ValueError, match=r"episodes=\[4, 99\]: dataset '.*' has 4, numbered 0 to 3"):
        measure.held_out_batches(toy_teacher, toy.REPO_ID, toy_dataset, [0, 4, 99])


@pytest.mark.parametrize("feature", ["action", "observation.state"])
def test_data_of_another_robot_are_refused(feature: str, toy_teacher: Path, toy_dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(toy_dataset, tmp_path / "data")
    file = tmp_path / "data" / "meta" / "info.json"
    info = json.loads(file.read_text())
    info["features"][feature]["shape"] = [6]
    file.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=rf"has '{feature}' of shape \(6,\), the policy's is \(2,\); measure on data"):
        measure.held_out_batches(toy_teacher, toy.REPO_ID, tmp_path / "data")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("v2.1", r"is in 2\.1 format\.; convert it: python -m .*convert_dataset_v21_to_v30 --repo-id=me/old"),
        ("v2.0", "Contact the maintainer"),
    ],
)
def test_data_of_an_older_format_say_so_in_one_line(
    version: str, said: str, toy_teacher: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    shutil.copytree(toy_dataset, tmp_path / "data")
    file = tmp_path / "data" / "meta" / "info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"codebase_version": version}))
    with pytest.raises(ValueError, match=f"dataset 'me/old' is in a format of another lerobot: .*{said}") as caught:
        measure.held_out_batches(toy_teacher, "me/old", tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_a_teacher_agrees_with_itself(toy_teacher: Path, batches: list[dict[str, Any]]) -> None:
    teacher = policy_files.load_policy(toy_teacher)
    found = measure.evaluate_reflow(policy_files.load_policy(toy_teacher), teacher, batches, num_steps=(1, 10))
    assert found.student.error[10] == found.teacher.error[10] == 0
    assert found.student.error == found.teacher.error
    assert found.student.error[1] > 0
    assert found.student.straightness == found.teacher.straightness > 0
    assert found.student.spread == found.teacher.spread
    assert (found.num_observations, found.teacher_num_steps) == (10, 10)
    assert all(latency > 0 for latency in found.student.latency_ms.values())
    assert json.loads(json.dumps(dataclasses.asdict(found)))["student"]["error"]["10"] == 0


def test_memory_to_act_is_counted_to_the_byte(toy_teacher: Path, batches: list[dict[str, Any]], noise: Tensor) -> None:
    policy = policy_files.load_policy(toy_teacher)
    named = [*policy.named_parameters(), *policy.named_buffers()]
    distinct = {tensor.data_ptr(): tensor.nbytes for _, tensor in named}
    policy.model.sample_actions = lambda *arguments, noise: noise + torch.zeros(1000, dtype=torch.int64).float().sum()
    found = measure.memory_to_act(policy, known_flows.observe(policy, batches[0]), noise)
    # int64 zeros beside their float copy; all other tensors are smaller
    assert found == (sum(distinct.values()), 8000 + 4000)


def test_a_constant_field_is_straight_and_needs_one_step(toy_teacher: Path, batches: list[dict[str, Any]]) -> None:
    policy = policy_files.load_policy(toy_teacher)
    velocity = torch.tensor([1.0, -2.0, 0.0, 0.0])
    policy.model.denoise_step = lambda **arguments: velocity.expand_as(arguments["x_t"])
    found = measure.evaluate_reflow(policy, policy, batches, num_steps=(1, 4))
    assert found.student.error[1] < 1e-5
    assert found.student.straightness < 1e-10
    assert found.student.spread[1] == pytest.approx(found.student.spread[10], rel=1e-5)


def test_trajectory_is_lerobots_own_sampling(toy_teacher: Path, batches: list[dict[str, Any]], noise: Tensor) -> None:
    policy = policy_files.load_policy(toy_teacher)
    path = measure.sample_trajectory(policy, known_flows.observe(policy, batches[0]), noise, 10)
    assert path.shape == (11, 8, 6, 4)
    assert torch.equal(path[0], noise)
    with torch.no_grad():
        want = policy.model.sample_actions(*known_flows.observe(policy, batches[0]).arguments(), noise=noise)
    assert torch.equal(path[-1], want)


def test_nothing_is_left_changed(toy_teacher: Path, batches: list[dict[str, Any]], monkeypatch: Any) -> None:
    student, teacher = policy_files.load_policy(toy_teacher), policy_files.load_policy(toy_teacher)
    student.train()
    state = torch.get_rng_state()
    measure.evaluate_reflow(student, teacher, batches, num_steps=(1,))
    assert torch.equal(torch.get_rng_state(), state)
    assert (student.training, teacher.training) == (True, False)
    for policy in (student, teacher):
        assert policy.config.num_steps == 10
        assert policy.model.rtc_processor is None

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(student.model, "sample_actions", fail)
    with pytest.raises(RuntimeError, match="injected"):
        measure.evaluate_reflow(student, teacher, batches, num_steps=(1,))
    assert student.training
    assert student.config.num_steps == 10


def test_policies_take_turns_while_they_are_timed(
    toy_teacher: Path, batches: list[dict[str, Any]], noise: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = {name: policy_files.load_policy(toy_teacher) for name in ("teacher", "student")}
    names = {id(policy): name for name, policy in policies.items()}
    timed: list[tuple[str, int]] = []

    def latency_ms(policy: Any, observation: Any, noise: Tensor, num_steps: int) -> float:
        timed.append((names[id(policy)], num_steps))
        return float(len(timed))

    monkeypatch.setattr("hf_memopt.lerobot.evaluate.measure._latency_ms", latency_ms)
    monkeypatch.setattr("hf_memopt.lerobot.evaluate.measure._NUM_LATENCY_RUNS", 3)
    found = measure._latencies_ms(policies, batches[0], noise[:1], [1, 2])
    assert timed == [("teacher", 1), ("student", 1)] * 3 + [("teacher", 2), ("student", 2)] * 3
    assert found == {"teacher": {1: 3.0, 2: 9.0}, "student": {1: 4.0, 2: 10.0}}


def test_a_student_that_is_worse_than_the_teachers_own_few_steps_is_named(
    toy_teacher: Path, batches: list[dict[str, Any]]
) -> None:
    teacher = policy_files.load_policy(toy_teacher)
    evaluation = measure.evaluate_reflow(teacher, teacher, batches, num_steps=[1])
    assert evaluation.shortcoming(1) is None  # as good as the teacher itself
    worse = dataclasses.replace(evaluation.student, error={1: 2 * evaluation.teacher.error[1]})
    warning = dataclasses.replace(evaluation, student=worse).shortcoming(1)
    assert warning is not None
    assert warning.startswith("With 1 step the student's error, ")
    assert dataclasses.replace(evaluation, student=worse).shortcoming(3) is None  # which nobody measured
