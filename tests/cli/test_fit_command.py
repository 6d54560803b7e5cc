"""`hf-memopt fit`: whole runs of scripts, their arguments, output and exit status, and refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memopt.cli import main

SCRIPT = """
import os, signal, sys
import torch
from accelerate import Accelerator
from torch import nn

print("arguments", sys.argv[1:])
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for step in range(6):
    loss = model(torch.randn(64, 512)).square().mean()
    if "killed" in sys.argv and not os.path.exists("again"):
        open("again", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("end", sum(each.double().sum().item() for each in model.state_dict().values()))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=dict(os.environ))


def fit(*words: str) -> "subprocess.CompletedProcess[str]":
    return run("-m", "hf_memopt.cli", "fit", *words)


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="fit on a CPU needs Linux")
def test_a_script_is_what_it_is_without(script: Path) -> None:
    plain = run("train.py", "3", "--disk", "x")
    assert plain.returncode == 3, plain.stderr
    found = fit("--", "train.py", "3", "--disk", "x")
    assert (found.returncode, found.stdout) == (3, plain.stdout), found.stderr
    assert "fit: everything fits; from now on nothing is changed" in found.stderr


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="fit on a CPU needs Linux")
def test_a_script_that_is_killed_in_its_first_step_begins_again_with_all_parts_away(script: Path) -> None:
    plain = run("train.py", "0")
    found = fit("--disk", ".", "--", "train.py", "0", "killed")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert "memory ran out in the first steps; starting again with all parts away" in found.stderr
    assert "fit: weights live in a file" in found.stderr


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="fit on a CPU needs Linux")
def test_what_cannot_fit_ends_with_the_memory_that_would_do(script: Path) -> None:
    found = fit("--memory", "64MiB", "--", "train.py", "0")
    assert found.returncode == 1
    *_, line = found.stderr.splitlines()
    assert line.startswith("hf-memopt fit: training needs ")
    assert "and may take 64.00 MiB; give it --memory " in line
    named = line.partition("give it --memory ")[2].partition(",")[0]
    assert fit("--memory", named, "--", "train.py", "0").returncode == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "-- and a script must follow the flags: hf-memopt fit [FLAGS] -- SCRIPT"),
        ("-- missing.py", "SCRIPT='missing.py' is not a file"),
        ("--memory lots -- train.py", "memory='lots' is not a size; write, for instance, 8GiB"),
        ("--host 0 -- train.py", "host='0' is not a size"),
        ("--disk missing -- train.py", "disk='missing' is no folder"),
        ("--max-slowdown -1 -- train.py", "argument --max-slowdown: -1"),
        ("--budget_gib 1 -- train.py", "unrecognized arguments: --budget-gib 1"),
    ],
)
def test_mistakes_are_one_line(words: str, complaint: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-memopt fit: error: ")
    assert complaint in line
