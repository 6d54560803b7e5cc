"""Commands that plans print, run in a process that has imported their libraries already."""

import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fork_server import Call, ForkServer

from hf_memopt import cli

PRELOADED = ("torch", "datasets", "trl", "peft", "accelerate.commands.launch", "hf_memopt.recipes.train_sft")
# Kernels of 8-bit optimizers would be compiled, for half a minute each.
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}


# Where most tests do not see it; see the Makefile.
APART = Path(sys.prefix) / "apart"


def run_printed(words: Sequence[str], path: str = "", **environ: str) -> str:
    """Run `accelerate launch …` or `hf-memopt launch …` to its end, in the present folder; return what it writes.

    `path` has libraries that the environment has not.
    """
    (ended,) = _server(path).run([Call("printed_commands:run", [list(words)], environ)])
    assert ended.status == 0, ended.output[-6000:]
    return ended.output


def run_in_shell(folder: Path, command: str, **environ: str) -> str:
    """Run a command as a user types it in a folder; return its log."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = environ | {"PATH": folders}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@functools.cache
def _server(path: str) -> ForkServer:
    paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    return ForkServer(PRELOADED, {**os.environ, **UNCOMPILED, "PYTHONPATH": paths})


def run(words: list[str]) -> None:
    """Do in this process what the command does in new ones."""
    if words[:2] == ["accelerate", "launch"]:
        _launch(words[2:])
        return
    assert words[:2] == ["hf-memopt", "launch"], words
    with patch.object(subprocess, "run", _run_here):
        assert cli.main(words[1:]) == 0


def _run_here(command: list[str], env: Mapping[str, str]) -> Any:
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    os.environ.update(env)
    _launch(command[3:])
    return SimpleNamespace(returncode=0)


def _launch(arguments: list[str]) -> None:
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    parsed, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    (python, *command), environment = prepare_simple_launcher_cmd_env(parsed)
    assert python == sys.executable
    os.environ.update(environment)
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
