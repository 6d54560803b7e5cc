"""`hf-memopt evaluate`: the table, the files, and an environment."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


def side(error: float, latency_ms: float) -> Any:
    from hf_memopt.integrations.lerobot.evaluate.measure import ModelEvaluation

    steps = (1, 2, 10)
    return ModelEvaluation(
        error={k: error / k for k in steps},
        action_error=dict.fromkeys(steps, 1.0),
        straightness=2.0,
        normalized_straightness=error / 10,
        spread=dict.fromkeys(steps, 0.25),
        latency_ms={k: latency_ms * k for k in steps},
    )


@pytest.fixture
def evaluation() -> Any:
    from hf_memopt.integrations.lerobot.evaluate.measure import ReflowEvaluation

    return ReflowEvaluation(48, 10, teacher=side(0.5, 20.0), student=side(0.1, 21.0))


def test_the_table_has_a_row_for_each_number_of_steps(evaluation: Any) -> None:
    from hf_memopt.integrations.lerobot.evaluate.evaluation_table import table
    from hf_memopt.integrations.lerobot.evaluate.rollouts import RolloutResult

    lines = table(evaluation).splitlines()
    assert lines[0].split("  ")[0].strip() == "steps"
    assert lines[1].split() == ["1", "0.5000", "0.1000", "0.2500", "0.2500", "20.0", "21.0"]
    assert lines[3].split() == ["10", "0.0500", "0.0100", "0.2500", "0.2500", "200.0", "210.0"]
    assert "teacher 0.0500, student 0.0100" in table(evaluation)
    results = {steps: RolloutResult(10, 0.7, 2.5) for steps in (1, 2, 10)}
    assert table(evaluation, results).splitlines()[1].split()[-2:] == ["70%", "2.500"]


def test_the_files_hold_what_was_measured(evaluation: Any, tmp_path: Path) -> None:
    from hf_memopt.integrations.lerobot.evaluate.evaluation_table import write_evaluation
    from hf_memopt.integrations.lerobot.evaluate.rollouts import RolloutResult

    numbers, figure = write_evaluation(tmp_path / "new", evaluation, {1: RolloutResult(10, 0.7, 2.5)})
    found = json.loads(numbers.read_text())
    assert found["student"]["error"] == {"1": 0.1, "2": 0.05, "10": 0.01}
    assert found["environment"] == {"1": {"num_episodes": 10, "success_rate": 0.7, "mean_reward": 2.5}}
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick_evaluation")
def test_the_command_measures_and_rolls_out(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_memopt.recipes.reflow import smolvla_toy as toy

    flags = ["evaluate", "--policy", str(toy_student), "--output", str(tmp_path / "evaluation"), "--num-steps", "1,3"]
    data = ["--dataset-repo-id", toy.REPO_ID, "--dataset-root", str(toy_dataset), "--episodes", "3"]
    assert main([*flags, *data, "--env", "tiny_environment:Reach-v0", "--env-episodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "12 observations from 1 episode of `local/reach_past_obstacle`" in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [row[-2:] for row in rows] == [["100%", "3.000"]] * 2
    assert all(row[1] == row[2] for row in rows)  # untrained: still its teacher
    assert all(float(row[5]) > 0 for row in rows)
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert found["student"]["error"]["1"] == found["teacher"]["error"]["1"] > 0
    assert (tmp_path / "evaluation" / "evaluation.png").exists()


def test_success_is_the_environments_verdict_and_each_chunk_takes_its_steps(
    toy_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

    from hf_memopt.integrations.lerobot.evaluate.rollouts import RolloutResult, evaluate_in_environment

    num_evaluations = 0
    denoise = VLAFlowMatching.denoise_step

    def counted(*arguments: object, **kwargs: object) -> object:
        nonlocal num_evaluations
        num_evaluations += 1
        return denoise(*arguments, **kwargs)

    monkeypatch.setattr(VLAFlowMatching, "denoise_step", counted)
    state = torch.get_rng_state()
    found = evaluate_in_environment(str(toy_student), "tiny_environment:ReachTheImpossible-v0", [1, 3], num_episodes=3)
    assert found == dict.fromkeys([1, 3], RolloutResult(3, 0.0, 3.0))
    assert num_evaluations == 1 + 3  # one chunk of eight actions lasts the whole episode
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Nowhere-v0", "register it, or name its package"),
        ("no_such_package:Reach-v0", "No module named 'no_such_package'"),
        ("tiny_environment:ReachForever-v0", "no limit of steps"),
    ],
)
def test_unusable_environments_are_refused(toy_student: Path, env_id: str, message: str) -> None:
    from hf_memopt.integrations.lerobot.evaluate.rollouts import evaluate_in_environment

    with pytest.raises(ValueError, match=message):
        evaluate_in_environment(str(toy_student), env_id, [1])


def test_a_policy_without_a_teacher_needs_one_named(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = ["evaluate", "--policy", str(toy_teacher), "--output", str(tmp_path / "evaluation")]
    assert main(flags) == 2
    assert "pass --teacher" in capsys.readouterr().err
    assert not (tmp_path / "evaluation").exists()
