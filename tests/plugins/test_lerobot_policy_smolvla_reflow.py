"""Tests of the built distribution, which lerobot finds by name."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path

import pytest
from late_imports import LateModule
from patience import HANG_S

import hf_memopt

pytestmark = pytest.mark.e2e

lerobot_runs = LateModule("lerobot_runs")

NAME = "lerobot_policy_smolvla_reflow"
ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds only the installed plug-in."""
    folder = tmp_path_factory.mktemp("installed")
    # A pure wheel without dependencies is installed by unpacking.
    with zipfile.ZipFile(archives[f"{NAME}.whl"]) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def command(installed: Path, tmp_path: Path) -> Command:
    """A function that runs a command of lerobot in a new process, where only the plug-in names the policy."""

    def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        paths = [installed, ROOT / "tests", ROOT / "tests" / "plugins", os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        module = f"lerobot.scripts.{name.replace('-', '_')}"
        return subprocess.run(
            [sys.executable, "-m", module, *flags],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            env=environment,
            cwd=tmp_path,
        )

    return run


def test_the_wheel_has_the_name_that_lerobot_looks_for(installed: Path) -> None:
    assert {folder.name for folder in installed.iterdir()} == {NAME, f"{NAME}-{hf_memopt.__version__}.dist-info"}
    metadata = HeaderParser().parsestr((installed / f"{NAME}-{hf_memopt.__version__}.dist-info/METADATA").read_text())
    assert metadata["Name"] == NAME
    assert metadata.get_all("Requires-Dist") == [f"hf_memopt[lerobot]=={hf_memopt.__version__}"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Requires-Python"] == project["requires-python"]


def test_lerobot_trains_and_resumes_by_the_policys_type_alone(
    command: Command, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    trained = command("lerobot-train", *flags, "--save_freq=1")
    assert trained.returncode == 0, trained.stderr[-3000:]
    first = tmp_path / "run" / "checkpoints" / "000001" / "pretrained_model"
    assert json.loads((first / "config.json").read_text())["type"] == "smolvla_reflow"
    resumed = command("lerobot-train", f"--config_path={first / 'train_config.json'}", "--resume=true")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert lerobot_runs.logged(resumed.stderr, "step") == [2]


@pytest.mark.slow
def test_the_type_is_a_choice(command: Command) -> None:
    asked = ["--policy.type=smolvla_reflow", "--help"]
    known = command("lerobot-train", *asked)
    assert known.returncode == 0, known.stderr[-3000:]
    assert "--policy.teacher_model_path" in known.stdout


@pytest.mark.slow
def test_lerobot_evaluates_and_rolls_out(command: Command, toy_student: Path, tmp_path: Path) -> None:
    flags = [f"--policy.path={toy_student}", "--policy.device=cpu"]
    env = ["--env.discover_packages_path=reach_env", "--env.type=reach", "--eval.n_episodes=2", "--eval.batch_size=2"]
    evaluated = command("lerobot-eval", *flags, *env, f"--output_dir={tmp_path / 'eval'}")
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    found = json.loads((tmp_path / "eval" / "eval_info.json").read_text())
    assert found["overall"]["n_episodes"] == 2
    # The policy is loaded before the missing robot is noticed.
    robot = ["--robot.type=so100_follower", "--robot.port=/dev/null", "--device=cpu", "--task=anything"]
    rolled_out = command("lerobot-rollout", flags[0], *robot)
    assert "Policy loaded: type=smolvla_reflow" in rolled_out.stderr, rolled_out.stderr[-3000:]
