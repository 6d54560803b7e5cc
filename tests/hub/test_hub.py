"""Tests of downloads and uploads of policies by the real huggingface_hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub, serve
from huggingface_hub import constants
from late_imports import LateModule

from hf_memopt.cli import main

modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
io_utils = LateModule("lerobot.datasets.io_utils")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
lerobot_runs = LateModule("lerobot_runs")


TEACHER = "robots/teacher"


@pytest.fixture
def hub(tmp_path: Path, toy_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one teacher, the only server that huggingface_hub reaches."""
    with serve() as fake:
        fake.repositories[TEACHER] = {file.name: file.read_bytes() for file in toy_teacher.iterdir()}
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield fake


def test_teacher_from_the_hub(hub: FakeHub, toy_teacher: Path, tmp_path: Path) -> None:
    assert main(["prepare-student", "--teacher", TEACHER, "--output", str(tmp_path / "student")]) == 0
    config = policy_files.load_config(tmp_path / "student")
    assert config.teacher_model_path == TEACHER  # so that the student also trains on another machine
    student, teacher = lerobot_runs.weights(tmp_path / "student"), lerobot_runs.weights(toy_teacher)
    assert all(torch.equal(student[name], teacher[name]) for name in teacher)
    assert policy_files.resolve_checkpoint(TEACHER).is_relative_to(tmp_path / "cache")


def test_downloaded_teacher_serves_without_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = policy_files.resolve_checkpoint(TEACHER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert policy_files.resolve_checkpoint(TEACHER) == folder
    assert hub.requests == []


def test_missing_repository(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare-student", "--teacher", "robots/other", "--output", str(tmp_path / "student")]) == 2
    assert "'robots/other' is neither a checkpoint folder nor a hub id that can be reached" in capsys.readouterr().err
    assert not (tmp_path / "student").exists()


def test_training_goes_on_with_the_files_that_were_checked(hub: FakeHub, toy_student: Path, toy_dataset: Path) -> None:
    statistics = io_utils.load_stats(toy_dataset)
    files = {file.name: file.read_bytes() for file in toy_student.iterdir()}
    hub.repositories["robots/student"] = files
    config = policy_files.load_config(toy_student)
    config.pretrained_path = Path("robots/student")
    modeling_smolvla_reflow.SmolVLAReflowPolicy(config, dataset_stats=statistics)
    assert config.pretrained_path == policy_files.resolve_checkpoint("robots/student")
    hostile = files["policy_preprocessor.json"].replace(b'"registry_name": "device_processor"', b'"class": "os.mkdir"')
    hub.repositories["robots/hostile"] = {**files, "policy_preprocessor.json": hostile}
    config.pretrained_path = Path("robots/hostile")
    with pytest.raises(ValueError, match=r"snapshots/.*/policy_preprocessor.json: a step is 'os.mkdir'"):
        modeling_smolvla_reflow.SmolVLAReflowPolicy(config, dataset_stats=statistics)


@pytest.mark.parametrize("private", [True, False])
def test_export_to_the_hub(
    private: bool, hub: FakeHub, toy_student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "exported"
    flags = ["--no-evaluation", "--push-to-hub", "robots/student", *(["--private"] if private else [])]
    assert main(["export", "--policy", str(toy_student), "--output", str(output), *flags]) == 0
    assert f"pushed to {hub.url}/robots/student" in capsys.readouterr().out
    assert hub.repositories["robots/student"] == {file.name: file.read_bytes() for file in output.iterdir()}
    assert hub.private == ({"robots/student"} if private else set())
    downloaded = policy_files.resolve_checkpoint("robots/student")
    assert downloaded != output
    modeling_smolvla.SmolVLAPolicy.from_pretrained(downloaded, strict=True)


def test_push_without_permission_names_the_remedy(
    hub: FakeHub, toy_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(ValueError, match=r"(?s)could not be pushed to 'robots/student'.*hf auth login"):
        prepare.push_to_hub(toy_student, "robots/student")
    assert "robots/student" not in hub.repositories
