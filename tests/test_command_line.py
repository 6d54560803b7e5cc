"""Tests that a user's mistake becomes one line, and that any other error stays a traceback."""

import argparse
import configparser
import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, StrictDataclassFieldValidationError

from hf_memopt import command_line
from hf_memopt.command_line import check_output_file, check_output_folder, number, one_line_errors
from hf_memopt.ranges import COUNT

Capture = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[list[str]], None]:
    def main(arguments: list[str]) -> None:
        raise error

    return main


def file_error(number: int, path: str = "/a/b") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("steps=0 must be\n  at least 1"), "steps=0 must be at least 1"),
        (ValueError(), "ValueError"),
        (file_error(errno.ENOSPC), "'/a/b': No space left on device; free some space, or name another place"),
        (file_error(errno.EACCES), "'/a/b': Permission denied; name another place, or change its permissions"),
        (file_error(errno.ENAMETOOLONG), "'/a/b': File name too long; use a shorter name"),
        (file_error(errno.EIO), "[Errno 5] Input/output error: '/a/b'"),
        (OfflineModeIsEnabled("offline mode is enabled"), "offline mode is enabled"),
        (
            StrictDataclassFieldValidationError(field="size", cause=TypeError("expected int")),
            "Validation error for field 'size': TypeError: expected int",
        ),
        (
            ModuleNotFoundError("No module named 'lerobot.configs'", name="lerobot.configs"),
            "lerobot is not installed: pip install 'hf_memopt[lerobot]'",
        ),
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "einops is not installed; install it",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(error: Exception, line: str, capsys: Capture) -> None:
    assert one_line_errors("tool", raising(error), []) == 2
    assert capsys.readouterr() == ("", f"tool: error: {line} (--traceback shows where)\n")


def test_a_script_without_a_library_ends_in_one_line(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended, command_line.script_imports("tool", "__main__"):
        raise ModuleNotFoundError("No module named 'trl'", name="trl")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tool: error: trl is not installed: pip install 'hf_memopt[trl,peft]'")


def test_importing_a_script_without_a_library_raises() -> None:
    with pytest.raises(ModuleNotFoundError), command_line.script_imports("tool", "hf_memopt.recipes.tool"):
        raise ModuleNotFoundError("No module named 'trl'", name="trl")


def test_extras_exist() -> None:
    given = configparser.ConfigParser()
    given.read(Path(__file__).parents[1] / "setup.cfg")
    named = {name for extras in command_line._EXTRAS.values() for name in extras.split(",")}
    assert named <= set(given["options.extras_require"])


def test_what_this_library_has_said_itself_needs_no_traceback(capsys: Capture) -> None:
    assert one_line_errors("tool", lambda arguments: COUNT.check("steps", 0), []) == 2
    assert capsys.readouterr().err == "tool: error: steps=0 must be at least 1\n"


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("a bug"),
        TypeError("a bug"),
        ZeroDivisionError("a bug"),
        IndexError("a bug"),
        RuntimeError("a bug"),
        ModuleNotFoundError("No module named 'hf_memopt.nowhere'", name="hf_memopt.nowhere"),
        KeyboardInterrupt(),
    ],
)
def test_everything_else_is_a_traceback(error: BaseException, capsys: Capture) -> None:
    with pytest.raises(type(error)):
        one_line_errors("tool", raising(error), [])
    assert capsys.readouterr() == ("", "")


def test_traceback_shows_a_mistake_where_it_was_made_and_main_does_not_see_the_flag() -> None:
    seen = []

    def main(arguments: list[str]) -> None:
        seen.append(arguments)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        one_line_errors("tool", main, ["run", "--traceback", "--steps=0"])
    assert seen == [["run", "--steps=0"]]


@pytest.mark.parametrize(("result", "status"), [(None, 0), ({"loss": 1.0}, 0), (0, 0), (1, 1)])
def test_status_of_what_succeeds(result: object, status: int) -> None:
    assert one_line_errors("tool", lambda arguments: result, []) == status


def test_each_of_several_processes_says_which_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert one_line_errors("tool", raising(ValueError("bad")), []) == 2
    assert capsys.readouterr().err == "[rank 1] tool: error: bad (--traceback shows where)\n"


def test_numbers_of_a_command_line() -> None:
    assert number(COUNT)("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="0 must be at least 1"):
        number(COUNT)("0")
    with pytest.raises(ValueError, match="invalid literal"):
        number(COUNT)("1.5")


def test_places_that_cannot_be_written_to_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for check, path, message in (
        (check_output_folder, file, "is a file; name a folder"),
        (check_output_folder, file / "below", "is a file; name a folder"),
        (check_output_file, tmp_path, "is a folder; name a file"),
        (check_output_file, tmp_path / "missing" / "file", "there is no folder .*; make it, or name another"),
    ):
        with pytest.raises(ValueError, match=f"^output='{path}'.*{message}"):
            check("output", path)
    check_output_folder("output", tmp_path / "new" / "folder")
    check_output_file("output", file)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for check in (check_output_folder, check_output_file):
        with pytest.raises(ValueError, match="cannot be written to; name another place"):
            check("output", tmp_path / "new")


@pytest.mark.parametrize("check", [check_output_folder, check_output_file])
def test_a_name_that_is_too_long_is_refused(check: Callable[..., None], tmp_path: Path, capsys: Capture) -> None:
    assert one_line_errors("tool", lambda arguments: check("output", tmp_path / ("x" * 300)), []) == 2
    assert "File name too long; use a shorter name" in capsys.readouterr().err


RECIPES = ("train_causal_lm", "train_neural_operator", "train_lgt", "train_fluxflow", "train_sft", "reflow_smolvla")


@pytest.mark.parametrize("name", [*RECIPES, "reflow.demo"])
def test_an_unknown_flag_of_a_recipe_is_one_line(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = importlib.import_module(f"hf_memopt.recipes.{name}")
    capsys.readouterr()  # drops the libraries' warnings at import
    monkeypatch.setattr("sys.argv", [name])
    assert recipe.one_line_errors(name, recipe.main, ["--no_such_flag=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: error: ")
    assert "no_such_flag" in line
    assert "--help lists all" in line
