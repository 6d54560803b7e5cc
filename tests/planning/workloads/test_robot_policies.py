"""A policy of lerobot told from a transformers model by its files alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_memopt.planning.models import hub
from hf_memopt.planning.workloads.robot_policies import PolicyFile, policy_file

POLICY = {"type": "smolvla", "chunk_size": 50}
RUN = {"policy": POLICY, "batch_size": 8}
MODEL = {"model_type": "llama", "type": "smolvla"}


def write(path: Path, held: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    return path


def test_a_folders_run_counts_before_its_policy(tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", POLICY)
    assert policy_file(str(tmp_path)) == policy_file(str(config)) == PolicyFile(config, "smolvla", is_run=False)
    run = write(tmp_path / "train_config.json", RUN)
    assert policy_file(str(tmp_path)) == PolicyFile(run, "smolvla", is_run=True)
    assert policy_file(str(config)) == PolicyFile(config, "smolvla", is_run=False)


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    run = write(tmp_path / "my_run.json", RUN)
    assert policy_file(str(run)) == PolicyFile(run, "smolvla", is_run=True)
    assert policy_file(str(write(tmp_path / "my_policy.json", POLICY))) is None


@pytest.mark.parametrize("held", [MODEL, "{", [], {}, {"policy": {}}, {"type": 3}], ids=str)
def test_other_files_are_none(held: Any, tmp_path: Path) -> None:
    write(tmp_path / "config.json", held)
    assert policy_file(str(tmp_path)) is None
    assert policy_file(str(tmp_path / "config.json")) is None


def test_a_misspelt_path_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hf_hub_download", None)
    assert policy_file(str(tmp_path / "polciy")) is None


def test_a_policy_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, name: str) -> str:
        assert model == "lerobot/smolvla_base"
        if not (tmp_path / name).exists():
            raise LocalEntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert policy_file("lerobot/smolvla_base") is None
    config = write(tmp_path / "config.json", POLICY)
    assert policy_file("lerobot/smolvla_base") == PolicyFile(config, "smolvla", is_run=False)
    run = write(tmp_path / "train_config.json", RUN)
    assert policy_file("lerobot/smolvla_base") == PolicyFile(run, "smolvla", is_run=True)
