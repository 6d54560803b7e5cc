"""Tests that every flag of every command and recipe may be written with `-` and with `_`."""

import argparse
import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from hf_memopt.cli import _parser, main
from hf_memopt.command_line import Parser

COMMANDS = [
    *("prepare-student", "precompute", "evaluate", "export", "doctor", "report", "configs", "estimate", "plan"),
    *("launch", "compare", "verify"),
]


def words_of(action: argparse.Action) -> list[str]:
    value = [] if action.nargs == 0 else [str(next(iter(action.choices))) if action.choices else "1"]
    return [*action.option_strings[-1:], *value]


def spelt(flag: str, mark: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_").replace("_", mark)


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_commands(command: str) -> None:
    (commands,) = (action for action in _parser(command)._actions if isinstance(action, argparse._SubParsersAction))
    parser = commands.choices[command]
    flags = [action for action in parser._actions if action.option_strings and "_" in action.dest]
    needed = [action for action in parser._actions if action.required]
    for action in flags:
        flag, *value = words_of(action)
        others = [word for each in needed if each is not action for word in words_of(each)]
        plain = parser.parse_args([*others, flag, *value])
        for mark in "-_":
            assert vars(parser.parse_args([*others, spelt(flag, mark), *value])) == vars(plain)
            if value:
                assert vars(parser.parse_args([*others, f"{spelt(flag, mark)}={value[0]}"])) == vars(plain)


RECIPES = ["causal_lm", "neural_operator", "fluxflow", "lgt"]


@pytest.mark.parametrize("name", RECIPES)
def test_flags_of_recipes(name: str, tmp_path: Path) -> None:
    flags = importlib.import_module("hf_memopt.recipes.common.flags")
    module = importlib.import_module(f"hf_memopt.recipes.{name}.options")
    kind = getattr(module, "Options", None) or module.Config
    (tmp_path / "file.json").write_text("{}")
    words = [["--config_path", str(tmp_path / "file.json")]]
    for section, group in get_type_hints(kind).items():
        prefix = f"{section}." if name == "lgt" else ""
        values = ((each.name, getattr(group(), each.name)) for each in fields(group))
        words += [[f"--{prefix}{field}", str(value)] for field, value in values if isinstance(value, int | float)]
    for flag, value in words:
        plain = flags.read_options(kind, "", [flag, value], by_section=name == "lgt")
        for mark in "-_":
            assert flags.read_options(kind, "", [spelt(flag, mark), value], by_section=name == "lgt") == plain


def test_flags_of_launch_and_train_sft() -> None:
    memopt = importlib.import_module("hf_memopt.callbacks").MemoptArguments
    assert memopt.from_words(["--budget-gib", "3"]) == memopt.from_words(["--budget_gib", "3"])
    parse = importlib.import_module("hf_memopt.recipes.sft.options").parse
    dashed, plain = (parse("", [spelt("--max_steps", mark), "3", spelt("--lora_rank", mark), "2"]) for mark in "-_")
    assert (dashed.sft, dashed.training.max_steps) == (plain.sft, plain.training.max_steps)


def test_words_after_two_dashes_and_of_others_stay() -> None:
    parser: Any = Parser()
    parser.add_argument("--seq-len")
    parser.add_argument("--base_dir")
    words = ["--seq_len", "2", "--base-dir=x_y", "--others_flag", "--", "--seq_len", "3"]
    found, unknown = parser.parse_known_args(words)
    assert (found.seq_len, found.base_dir) == ("2", "x_y")
    assert unknown[0] == "--others_flag"
    assert unknown[-2:] == ["--seq_len", "3"]


def test_a_script_gets_its_words_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        started.append(command)
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    script = tmp_path / "train.py"
    script.touch()
    words = ["--budget_gib", "3", "--base-dir", "x"]
    assert main(["launch", "--budget-gib", "6", "--", str(script), *words]) == 0
    assert started[0][-5:] == [str(script), *words]
