"""Signals end a command with the training that it has started, and its folders."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import HANG_S, wait_for

from hf_memopt.command_line import one_line_errors

SCRIPT = """
import subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path("begun").touch()
time.sleep(600)
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("command_name", "name"),
    [("launch", "SIGTERM"), ("launch", "SIGKILL"), ("verify", "SIGHUP"), ("verify", "SIGINT"), ("verify", "SIGKILL")],
)
@pytest.mark.sweep(share=0.2)
def test_training_ends_with_its_command(command_name: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    folders = tmp_path / "folders"
    folders.mkdir()
    number = getattr(signal, name)
    flags = ["--switch=gradient_checkpointing=true"] if command_name == "verify" else []
    line = [sys.executable, "-m", "hf_memopt.cli", command_name, *flags, "--cpu", "--", "train.py"]
    with (tmp_path / "log").open("w") as log:
        command = subprocess.Popen(
            line,
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": str(folders)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_for(lambda: (tmp_path / "begun").exists() or command.poll() is not None)
    tree = psutil.Process(command.pid).children(recursive=True)
    assert len(tree) >= 3, (tmp_path / "log").read_text()
    command.send_signal(number)
    assert command.wait(HANG_S) == (-number if name == "SIGKILL" else 128 + number)
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in tree))
    assert not [*folders.glob("hf-memopt-*")]
    assert "hf_memopt/cli/" not in (tmp_path / "log").read_text()  # no traceback of the command


@pytest.mark.parametrize("flags", [[], ["--traceback"]])
def test_ctrl_c_is_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *flags])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt if flags else SystemExit):
            one_line_errors("program", lambda arguments: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ("" if flags else "program: interrupted\n")
