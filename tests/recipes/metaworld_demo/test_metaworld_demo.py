"""The demo in Meta-World, at the smallest sizes. Skipped without the extra `metaworld`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_stage_runs(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="the extra 'metaworld' is not installed")
    command = [sys.executable, "-m", "hf_memopt.recipes.metaworld_demo.demo", "--output", str(tmp_path)]
    few = ("--demonstrations=1", "--teacher-steps=2", "--student-steps=2", "--episodes=2")
    done = subprocess.run([*command, *few], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    policies = json.loads((tmp_path / "results.json").read_text())["policies"]
    assert list(policies) == ["teacher_10", "teacher_4", "teacher_2", "teacher_1", "student_1", "second_1"]
    for found in policies.values():
        assert list(found["success"]) == ["drawer-close-v3", "handle-press-v3", "button-press-topdown-v3", "all"]
        assert found["success"]["all"]["episodes"] == 6
    assert policies["teacher_10"]["error"] == 0
    assert policies["teacher_1"]["error"] > 0
    with pytest.raises(subprocess.CalledProcessError):  # the folder is in use
        subprocess.run([*command, *few], capture_output=True, check=True)
