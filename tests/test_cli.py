"""Tests of the hf-memopt command: its output, its files and its refusals."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_memopt import __version__
from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hf_memopt {__version__}\n"


COMMANDS = (
    *("prepare-student", "precompute", "evaluate", "export"),
    *("doctor", "report", "configs", "estimate", "plan", "compare", "verify", "fit", "launch", "completion"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Capture) -> None:
    if command == "launch":  # launch reads its words itself, and passes the others to accelerate
        assert main([command, "--help"]) == 0
    else:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
    assert f"usage: hf-memopt {command}" in capsys.readouterr().out


def test_every_command_is_listed_once(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r" {4}\w", line)]
    assert sorted(listed) == sorted(COMMANDS)


def test_without_a_command_it_says_what_it_does(capsys: Capture) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if re.match(r" {2}\w", line)]
    assert len(told) == 10
    assert {command for line in told for command in re.findall(r"hf-memopt ([\w-]+)", line)} < set(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "--seq-len" in script
    assert "neural_operator" in script


def test_bash_completes_a_command(tmp_path: Path, capsys: Capture) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    main(["completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    ask = f"source {script}; COMP_WORDS=(hf-memopt est); COMP_CWORD=1; "
    ask += "$(complete -p hf-memopt | grep -oP '(?<=-F )\\S+'); "
    found = subprocess.run([bash, "-c", ask + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["estimate"]
