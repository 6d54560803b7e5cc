import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hf_memopt.recipes.common.flags import (
    Count,
    NotNegative,
    as_settings,
    as_words,
    explained,
    flag,
    read_options,
    write_options,
)


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


NONE = Options(Model(), Training())


@pytest.mark.parametrize("by_section", [False, True])
@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_flags_and_files_read_the_same_options(kind: str, by_section: bool, tmp_path: Path) -> None:
    def read(*words: str) -> Options:
        return read_options(Options, "", words, by_section=by_section)

    file = tmp_path / f"options.{kind}"
    sections = {"model": {"width": 8, "depths": [3], "scale": None}, "training": {"fast": True}}
    file.write_text(json.dumps(sections) if kind == "json" else f"# of a run\n{yaml.safe_dump(sections)}")
    expected = Options(Model(8, [3], None), Training(True, "a b"))
    assert read("--width=8", "--depths", "3", "--fast", "--name", "a b") == expected
    assert read("--model.width=8", "--model.depths", "3", "--training.fast", "--training.name", "a b") == expected
    assert read(f"--config_path={file}", "--training.name=a b") == expected
    changed = read(f"--config_path={file}", "--width=2", "--training.fast=false")
    assert changed == Options(Model(2, [3], None), Training(False))


@pytest.mark.parametrize(
    "options", [NONE, Options(Model(2, [5, 6], 0.5), Training(True, "off")), NONE._replace(model=Model(7))]
)
def test_what_is_written_is_read_again(options: Options, tmp_path: Path) -> None:
    assert read_options(Options, "", ["--config_path", str(write_options(tmp_path / "o.yaml", options))]) == options


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("o.json", '{} // wide', "cannot be read as JSON; it has no comments, which a .yaml file may have: "),
        ("o.yaml", "model: [", "cannot be read as YAML: "),
        ("o.yaml", "3", "must hold an object with sections model, training"),
        ("o.yaml", "modle: {}", "no section 'modle'; there are model, training"),
        ("o.yaml", "model: {width: null}", "model.width=null: this field needs a value"),
        ("o.yaml", "model: {widht: 3}", "'--model.widht=3' is not a flag; the nearest is --model.width"),
        ("o.yaml", "model: {width: 0}", "width=0 must be at least 1"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_options(Options, "", ["--config_path", str(tmp_path / name)], by_section=True)


def test_a_file_that_is_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=r"^config_path='recipes/configs/none.yaml': there is no such file; "):
        read_options(Options, "", ["--config_path", "recipes/configs/none.yaml"])


def test_instances_share_no_default() -> None:
    first, second = (read_options(Options, "", []) for _ in range(2))
    first.model.depths.append(7)
    assert second.model.depths == Model().depths == [1, 2]


def test_words_are_read_again() -> None:
    options = Options(Model(2, [5, 6], 0.5), Training(True))
    groups = (vars(group).items() for group in options)
    assert (
        read_options(Options, "", [word for group in groups for item in group for word in as_words(*item)]) == options
    )
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
        (["--model.wide=3"], "'--model.wide=3' is not a flag; the nearest is --model.width"),
        (["--widht=3"], "'--widht=3' is not a flag; the nearest is --model.width"),
        (["--model.width=0"], "model.width=0 must be at least 1"),
        (["--model.depths", "1", "0"], "model.depths=0 must be at least 1"),
        (["--model.width=x"], "model.width.* invalid int value: 'x'"),
    ],
)
def test_a_mistake_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(Options, "", words, by_section=True)
