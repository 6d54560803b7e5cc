"""`hf-memopt launch`: its call of accelerate, and its refusals. Whole runs: callbacks/test_every_trainer.py."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]
callbacks = LateModule("hf_memopt.callbacks")
MODULE = "hf_memopt.callbacks.every_trainer"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], str]]:
    """Collect the commands instead of running them, each with its HF_MEMOPT, and write a script to launch."""
    runs: list[tuple[list[str], str]] = []

    class Ended:
        returncode = 7

    def run(command: list[str], env: dict[str, str]) -> Any:
        runs.append((command, env["HF_MEMOPT"]))
        return Ended

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.delenv("HF_MEMOPT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return runs


def test_flags_are_parted_and_the_scripts_own_are_left_alone(started: Any) -> None:
    words = "--num_processes 2 --budget_gib 6 --mixed_precision=bf16 --no_memory_log -- train.py --offload x -- --help"
    assert main(["launch", *words.split()]) == 7
    ((command, variable),) = started
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision=bf16"]
    assert command == [*launcher, "-m", MODULE, *["train.py", "--offload", "x", "--", "--help"]]
    assert variable == "budget_gib=6.0,memory_log=False"


def test_without_flags_it_is_what_attach_alone_is(started: Any) -> None:
    main(["launch", "--", "-m", "trl.scripts.sft", "--config", "sft.yaml"])
    ((command, variable),) = started
    assert command[3:] == ["-m", MODULE, "-m", "trl.scripts.sft", "--config", "sft.yaml"]
    assert variable == ""


def test_a_disk_reaches_the_script(started: Any) -> None:
    main(["launch", "--disk", ".", "--disk_budget_gib", "2", "--optimizer-home", "file", "--", "train.py"])
    ((_, variable),) = started
    assert variable == "disk=.,disk_budget_gib=2.0,optimizer_home=file"


def test_flags_overrule_the_variable(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MEMOPT", "budget_gib=6, leak_check=true")
    main(["launch", "--budget_gib=4", "--", "train.py"])
    ((_, variable),) = started
    assert variable == "budget_gib=4.0,leak_check=True"


@pytest.mark.parametrize(
    ("words", "variable", "complaint"),
    [
        ("", "", "-- and a script must follow the flags"),
        ("train.py", "", "-- and a script must follow the flags"),
        ("--budget_gib 6 --", "", "-- and a script must follow the flags"),
        ("-- missing.py", "", "SCRIPT='missing.py' is not a file"),
        ("--budget_gib six -- train.py", "", "budget_gib.*invalid float value: 'six'"),
        ("--budget_gib -1 -- train.py", "", "budget_gib=-1.0 must be at least 0"),
        ("--disk missing -- train.py", "", "disk='missing' is no folder"),
        ("--disk_budget_gib 1 -- train.py", "", "disk_budget_gib=1.0 needs disk"),
        ("--offload all --budget_gib 1 -- train.py", "", "budget_gib=1.0 needs offload=auto"),
        ("-- train.py", "bugdet=6", "HF_MEMOPT='bugdet=6': 'bugdet=6' sets no field"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, variable: str, complaint: str, started: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("HF_MEMOPT", variable)
    assert main(["launch", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-memopt launch: error: ")
    assert re.search(complaint, line), line
    assert started == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_field(flag: str, capsys: Capture) -> None:
    assert main(["launch", flag]) == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(callbacks.MemoptArguments):
        name = f"no_{field.name}" if field.default is True else field.name
        assert f"\n  --{name} " in printed
