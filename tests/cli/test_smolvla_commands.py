"""`hf-memopt prepare-student`, `precompute`, `evaluate` and `export`: files, output and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import refused

from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.e2e
def test_prepared_student_trains_with_the_printed_command(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    from lerobot_runs import PLUGIN, lerobot_train, run, train_flags, weights

    student = tmp_path / "student"
    assert main(["prepare-student", "--teacher", str(toy_teacher), "--output", str(student)]) == 0
    printed = capsys.readouterr().out
    assert f"lerobot-train --policy.path={student} --dataset.repo_id=<repo>" in printed
    assert f"accelerate launch -m hf_memopt.recipes.reflow_smolvla --policy.path={student}" in printed
    run(lerobot_train, PLUGIN, *train_flags(student, toy_dataset, tmp_path / "run", steps=1))
    assert weights(tmp_path / "run").keys() == weights(toy_teacher).keys()


def test_prepare_student_reports_errors(tmp_path: Path, capsys: Capture) -> None:
    message = refused(capsys, "prepare-student", "--teacher", "/nowhere", "--output", str(tmp_path / "student"))
    assert "'/nowhere' is neither a checkpoint folder nor a hub id" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "message"),
    [([], "is complete. Train with --policy.couplings_path="), ([3, 4], "2 shards are left to other processes")],
)
def test_precompute_passes_the_training_runs_flags_and_says_what_is_left(
    missing: list[int], message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def write(flags: list[str], output: Path, **options: Any) -> list[int]:
        calls.append((flags, output, options))
        return missing

    monkeypatch.setattr("hf_memopt.lerobot.precompute_pairs.precompute_for_policy", write)
    training, output = ["--policy.path=x", "--output=run"], tmp_path / "couplings"
    command = ["precompute", "--output", str(output)]
    assert main([*command, "--", *training]) == 0
    assert message in capsys.readouterr().out
    chosen = ["--batch-size", "4", "--shard-size", "8", "--store-observations"]
    assert main([*command, *chosen, "--", *training]) == 0
    assert calls == [
        (training, output, {"batch_size": 1, "shard_size": 1024, "store_observations": False}),
        (training, output, {"batch_size": 4, "shard_size": 8, "store_observations": True}),
    ]


@pytest.mark.e2e
@pytest.mark.usefixtures("quick_evaluation")
def test_the_command_measures_and_rolls_out(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_memopt.recipes.reflow import smolvla_toy as toy

    flags = ["evaluate", "--policy", str(toy_student), "--output", str(tmp_path / "evaluation"), "--num-steps", "1,3"]
    data = ["--dataset-repo-id", toy.REPO_ID, "--dataset-root", str(toy_dataset), "--episodes", "3"]
    assert main([*flags, *data, "--env", "tiny_environment:Reach-v0", "--env-episodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "6 observations from 1 episode of `local/reach_past_obstacle`" in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [row[-2:] for row in rows] == [["100%", "3.000"]] * 2
    assert all(row[1] == row[2] for row in rows)  # untrained: still its teacher
    assert all(float(row[5]) > 0 for row in rows)
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert found["student"]["error"]["1"] == found["teacher"]["error"]["1"] > 0
    assert (tmp_path / "evaluation" / "evaluation.png").exists()


def test_a_policy_without_a_teacher_needs_one_named(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = ["evaluate", "--policy", str(toy_teacher), "--output", str(tmp_path / "evaluation")]
    assert main(flags) == 2
    assert "pass --teacher" in capsys.readouterr().err
    assert not (tmp_path / "evaluation").exists()


def test_export_without_evaluation(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from lerobot_runs import weights

    output = tmp_path / "exported"
    flags = ["--policy", str(toy_student), "--output", str(output), "--num-steps", "2", "--no-evaluation"]
    assert main(["export", *flags]) == 0
    assert f"exported to {output}" in capsys.readouterr().out
    policy = SmolVLAPolicy.from_pretrained(output, strict=True)
    assert policy.config.num_steps == 2
    exported, student = weights(output), weights(toy_student)
    assert all(torch.equal(exported[name], student[name]) for name in student)
    assert "Not measured" in (output / "README.md").read_text()


def train_with_one_of_four_episodes_held_out(student: Path, dataset: Path, folder: Path) -> None:
    from lerobot_runs import PLUGIN, lerobot_train, run, train_flags

    run(lerobot_train, PLUGIN, *train_flags(student, dataset, folder, steps=1), "--dataset.eval_split=0.25")


@pytest.mark.e2e
@pytest.mark.usefixtures("quick_evaluation")
def test_export_measures_on_the_runs_held_out_episodes(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    train_with_one_of_four_episodes_held_out(toy_student, toy_dataset, tmp_path / "run")
    output = tmp_path / "exported"
    assert main(["export", "--policy", str(tmp_path / "run"), "--output", str(output)]) == 0
    card = (output / "README.md").read_text()
    assert "6 observations from 1 episode of `local/reach_past_obstacle`, held out from training" in card
    rows = [line.split("|")[1:4] for line in card.splitlines() if line.startswith("| 1 |")]
    assert len(rows) == 1
    teacher, student = (float(cell) for cell in rows[0][1:])
    assert teacher > 0
    assert student > 0


@pytest.mark.e2e
@pytest.mark.usefixtures("quick_evaluation")
def test_export_writes_the_figures_of_evaluate_into_the_card_and_measures_nothing(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ["--policy", str(toy_student)]
    data = ["--dataset-repo-id", "local/reach_past_obstacle", "--dataset-root", str(toy_dataset), "--episodes", "3"]
    evaluation = ["--evaluation", str(tmp_path / "evaluation")]
    assert main(["evaluate", *policy, *data, "--output", str(tmp_path / "evaluation"), "--num-steps", "1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        "hf_memopt.lerobot.student.model_card.evaluate_reflow", lambda *_, **__: pytest.fail("measured")
    )
    flags = [*policy, *evaluation, "--output", str(tmp_path / "exported")]
    assert "leave out --dataset-repo-id, --dataset-root and --episodes" in refused(capsys, "export", *flags, *data)
    assert main(["export", *flags]) == 0
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["student"]
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f" {found['latency_ms']['1']:.1f} |" in card
    assert f"student: 1 step, {found['latency_ms']['1']:.0f} ms" in card


@pytest.mark.e2e
@pytest.mark.usefixtures("quick_evaluation")
@pytest.mark.slow
def test_episodes_of_the_training_data_can_be_named(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    train_with_one_of_four_episodes_held_out(toy_student, toy_dataset, tmp_path / "run")
    policy = ["--policy", str(tmp_path / "run")]
    for episodes, said in (("3", "1 episode of `local/reach_past_obstacle`, held out"), ("0,3", "2 episodes of")):
        output = tmp_path / f"of_{episodes}"
        assert main(["evaluate", *policy, "--output", str(output), "--episodes", episodes, "--num-steps", "1"]) == 0
        assert f"{6 * len(episodes.split(','))} observations from {said}" in capsys.readouterr().out
    gone = ["evaluate", *policy, "--output", str(tmp_path / "gone"), "--episodes", "0,99"]
    assert "episodes=[99]: dataset 'local/reach_past_obstacle' has 4, numbered 0 to 3" in refused(capsys, *gone)


def test_a_folder_of_data_needs_their_name(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = ["--policy", str(toy_student), "--output", str(tmp_path / "out"), "--dataset-root", str(toy_dataset)]
    assert "needs --dataset-repo-id, the name of that dataset" in refused(capsys, "evaluate", *flags)


def test_export_refuses_an_existing_folder_before_it_measures(
    toy_student: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_memopt.lerobot.student.model_card.measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("precious")
    flags = ["--policy", str(toy_student), "--output", str(tmp_path)]
    assert "exists; name a new folder or remove this one" in refused(capsys, "export", *flags)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def moved(student: Path, copy: Path, **changes: object) -> list[str]:
    """Return the flags of a command for a copy of a student with a changed configuration."""
    shutil.copytree(student, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return ["--policy", str(copy), "--output", str(copy.parent / "output")]


@pytest.mark.parametrize("name", ["gone/to/nowhere", "/gone", "nobody/no-such-vlm"])
def test_a_vlm_that_is_gone_is_named(name: str, toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = moved(toy_student, tmp_path / "student", vlm_model_name=name)
    message = refused(capsys, "export", *flags, "--no-evaluation")
    assert f"vlm_model_name={name!r}" in message
    assert "write its folder or hub id into config.json, and as tokenizer_name into policy_preprocessor.json" in message


def test_data_that_are_gone_are_named(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = moved(toy_student, tmp_path / "student")
    data = ["--dataset-repo-id", "local/gone", "--dataset-root", str(tmp_path / "gone")]
    message = refused(capsys, "evaluate", *flags, *data)
    assert f"dataset 'local/gone' cannot be read from folder '{tmp_path / 'gone'}'" in message
    assert "name one with --dataset-repo-id and --dataset-root" in message
