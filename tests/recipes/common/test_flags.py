"""Dataclasses as flags: what is read from words and from files, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_memopt.recipes.common.flags import as_settings, as_words, explained, flag, read_flags, read_sections
from hf_memopt.recipes.common.numeric import Count, NotNegative


@dataclass
class Model:
    width: Count = flag(4, "of each layer")
    depths: list[Count] = flag([1, 2], "of each stage")
    scale: NotNegative | None = flag(None, "of the weights")


@dataclass
class Training:
    fast: bool = flag(False, "skip what takes long")
    name: str = flag("none", "of the run")


class Options(NamedTuple):
    model: Model
    training: Training


def test_both_ways_read_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"model": {"width": 8, "depths": [3], "scale": None}, "training": {"fast": True}}))
    expected = Options(Model(8, [3], None), Training(True, "a b"))
    assert read_flags(Options, "", ["--width=8", "--depths", "3", "--fast", "--name", "a b"]) == expected
    words = [f"--config_path={file}", "--training.name=a b"]
    assert read_sections(Options, "", words) == expected
    assert read_sections(Options, "", [*words, "--model.width=2", "--training.fast=false"]).model.width == 2


def test_instances_share_no_default() -> None:
    first, second = (read_flags(Options, "", []) for _ in range(2))
    first.model.depths.append(7)
    assert second.model.depths == Model().depths == [1, 2]


def test_words_are_read_again() -> None:
    options = Options(Model(2, [5, 6], 0.5), Training(True))
    groups = (vars(group).items() for group in options)
    assert read_flags(Options, "", [word for group in groups for item in group for word in as_words(*item)]) == options
    settings = as_settings(options, by_section=True)
    assert settings == {
        "model.width": 2,
        "model.depths": "[5, 6]",
        "model.scale": 0.5,
        "training.fast": True,
        "training.name": "none",
    }


def test_what_a_loader_says_comes_after_flag_and_remedy() -> None:
    with pytest.raises(ValueError, match="model='x' cannot be loaded; pass a folder: no such thing"):
        with explained("model='x' cannot be loaded; pass a folder"):
            raise OSError("no such thing")
    with pytest.raises(KeyError), explained("model='x'"):
        raise KeyError("a mistake of ours")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.wide=3"], "'--model.wide=3' is no flag; the nearest is --model.width"),
        (["--width=3"], "'--width=3' is no flag; the nearest is --model.width"),
        (["--model.width=0"], "model.width=0 must be at least 1"),
        (["--model.depths", "1", "0"], "model.depths=0 must be at least 1"),
        (["--model.width=x"], "model.width.* invalid int value: 'x'"),
    ],
)
def test_a_mistake_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_sections(Options, "", words)
