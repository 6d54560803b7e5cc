"""Tests of runs on several datasets, which lerobot merges into one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule

compute_stats = LateModule("lerobot.datasets.compute_stats")
lerobot_datasets = LateModule("lerobot.datasets")
several = LateModule("hf_memopt.lerobot.training_flags")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
training_flags = LateModule("hf_memopt.lerobot.training_flags")
runs = LateModule("lerobot_runs")
recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
precompute_pairs = LateModule("hf_memopt.lerobot.precompute_pairs")

IDS = "--dataset.repo_id=[toy/one,toy/two]"


@pytest.fixture(scope="module")
def pair(toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [toy_dataset, toy.write_dataset(tmp_path_factory.mktemp("other") / "dataset", num_episodes=2, seed=7)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("hf_memopt.lerobot.training_flags.HF_LEROBOT_HOME", tmp_path / "home")
    return tmp_path / "home"


def flags_of(pair: list[Path]) -> list[str]:
    return [IDS, f"--dataset.root=[{','.join(map(str, pair))}]"]


def opened(root: Path) -> Any:
    return lerobot_datasets.LeRobotDataset("toy/x", root=root)


def test_frames_follow_each_other_and_statistics_are_lerobots(pair: list[Path], home: Path) -> None:
    root = several.merge([("toy/one", pair[0]), ("toy/two", pair[1])])
    merged, sources = opened(root), [opened(each) for each in pair]
    assert root.parent == home / "merged"
    assert merged.num_episodes == sum(source.num_episodes for source in sources)
    frames = [source[index] for source in sources for index in range(len(source))]
    assert len(merged) == len(frames)
    for index in (0, 3, len(sources[0]), len(frames) - 1):
        ours, theirs = merged[index], frames[index]
        for name in ("observation.state", "action", "observation.images.top"):
            assert torch.equal(ours[name], theirs[name])
        assert ours["task"] == theirs["task"]
    expected = compute_stats.aggregate_stats([source.meta.stats for source in sources])
    for name, statistics in expected.items():
        for kind, value in statistics.items():
            np.testing.assert_array_equal(merged.meta.stats[name][kind], value)


def test_a_merged_dataset_is_made_once_and_anew_for_other_data(
    pair: list[Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = several.merge([("toy/one", pair[0]), ("toy/two", pair[1])])
    shutil.copytree(pair[0], tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr("hf_memopt.lerobot.training_flags.aggregate_datasets", None)
        assert several.merge([("renamed", tmp_path / "copy"), ("toy/two", pair[1])]) == first
    statistics = tmp_path / "copy" / "meta" / "stats.json"
    content = json.loads(statistics.read_text())
    content["action"]["mean"][0] += 1
    statistics.write_text(json.dumps(content))
    assert several.merge([("renamed", tmp_path / "copy"), ("toy/two", pair[1])]) != first
    assert several.merge([("toy/two", pair[1]), ("toy/one", pair[0])]) != first
    assert not [each for each in (home / "merged").iterdir() if each.name.count("-")], "no draft is left"


def test_flags_of_one_dataset_are_left_alone() -> None:
    flags = ["--dataset.repo_id=toy/one", "--steps=3"]
    assert several.with_one_dataset(flags) == flags
    assert several.with_one_dataset(["--steps=3"]) == ["--steps=3"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset.repo_id=[a]"], r"dataset.repo_id=\['a'\] and dataset.root=None: pass two datasets or more"),
        (
            ["--dataset.repo_id=[a,b]", "--dataset.root=[x]"],
            r"dataset.root=\['x'\]: pass two .* as many fold",
        ),
        (["--dataset.repo_id=[a,b"], r"dataset.repo_id=\[a,b is no list; write \[one,another\]"),
        (
            ["--dataset.repo_id=[a,b]", "--dataset.root=[PLACE/a,PLACE/b]"],
            r"dataset 'a' cannot be read",
        ),
    ],
)
def test_malformed_lists_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        several.with_one_dataset([flag.replace("PLACE", str(tmp_path)) for flag in flags])


def test_data_of_another_robot_are_refused(pair: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    info = json.loads((other / "meta" / "info.json").read_text())
    info["fps"] += 1
    info["features"]["action"]["shape"] = [9]
    (other / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"'toy/one' and 'toy/two' differ in fps \(\d+ and \d+\), action \(.* and .*9"):
        several.merge([("toy/one", pair[0]), ("toy/two", other)])


@pytest.mark.e2e
def test_reflow_trains_on_several_datasets(
    pair: list[Path], toy_vlm: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's too, so that statistics agree; couplings are made by the same flags."""
    root = several.merge([("toy/one", pair[0]), ("toy/two", pair[1])])
    teacher = runs.train_teacher(toy.policy_flags(toy_vlm), root, tmp_path / "teacher")
    student = prepare.prepare_student(str(teacher), tmp_path / "student")
    flags = [each for each in runs.train_flags(student, root, tmp_path / "run", steps=2) if "--dataset." not in each]
    log = runs.run(recipe.main, *flags, *flags_of(pair))
    assert len(runs.logged(log, "loss")) == 2
    saved = tmp_path / "run" / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    assert json.loads(saved.read_text())["dataset"]["root"] == str(root)
    with_pairs = [each.replace("/run", "/paired") for each in flags]
    assert precompute_pairs.precompute_for_policy([*with_pairs, *flags_of(pair)], tmp_path / "pairs") == []
    coupled = runs.run(recipe.main, *with_pairs, *flags_of(pair), f"--policy.couplings_path={tmp_path / 'pairs'}")
    assert len(runs.logged(coupled, "loss")) == 2


@pytest.mark.e2e
def test_data_of_an_older_format_are_refused_before_training(
    toy_student: Path, pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    shutil.copytree(pair[0], old)
    info = json.loads((old / "meta" / "info.json").read_text())
    (old / "meta" / "info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    flags = runs.train_flags(toy_student, old, tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match=r"is in a format of another lerobot: .*convert it: python -m lerobot"):
        runs.run(recipe.main, *flags)
