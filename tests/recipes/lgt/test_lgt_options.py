import json
from dataclasses import fields
from pathlib import Path

import pytest

from hf_memopt.recipes.lgt import options as lgt_config
from hf_memopt.recipes.lgt.options import Options, parse

CONFIGS = Path(lgt_config.__file__).parents[1] / "configs"


def write(folder: Path, **sections: object) -> str:
    (folder / "config.json").write_text(json.dumps(sections))
    return f"--config_path={folder / 'config.json'}"


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, training={"batch_size": 5, "learning_rate": 1}, loss={"style_weights": [1, 2.5]})
    config = parse("", [path, "--training.batch_size", "7", "--training.use_amp", "--checkpoint.save_dir=12"])
    assert (config.training.batch_size, config.training.learning_rate, config.training.num_epochs) == (7, 1, 100)
    assert config.training.use_amp is True
    assert config.checkpoint.save_dir == "12"
    assert config.loss.style_weights == [1, 2.5]
    flags = ["--training.use_amp=false", "--data.style_subdirs", "photo", "monet"]
    config = parse("", [path, *flags])
    assert config.training.use_amp is False
    assert config.data.style_subdirs == ["photo", "monet"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    config = parse("", ["--loss.max_spatial_samples=256", "--offload.offload=all"])
    assert parse("", [write(tmp_path, **config.as_dict())]) == config


@pytest.mark.parametrize("name", ["lgt.json", "lgt_demo.json"])
def test_the_configurations_in_the_repository_are_valid(name: str) -> None:
    config = parse("", [f"--config_path={CONFIGS / name}"])
    assert config.training.ode_integration_steps > 1


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("What it does.", ["--help"])
    printed = capsys.readouterr().out
    assert "What it does." in printed
    for section, kind in Options.__annotations__.items():
        for field in fields(kind):
            assert f"--{section}.{field.name}" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.batchsize=3"], r"'--training.batchsize=3' is not a flag; the nearest is --training.batch_size"),
        (["--batchsize", "3"], r"'--batchsize' is not a flag; the nearest is --training.batch_size"),
        (["--training.batch_size=true"], r"training.batch_size.*: invalid int value: 'true'"),
        (["--loss.style_weights", "1"], r"loss.style_weights=\[1.0\] must have model.num_styles=2 values"),
        (["--loss.patch_size=4"], r"loss.patch_size=4 must be odd"),
        (["--offload.offload=inputs"], r"add --training.use_gradient_checkpointing"),
        (
            ["--config_path=/nowhere/config.json"],
            r"config_path='/nowhere/config.json': there is no such file; name yours or one of",
        ),
    ],
)
def test_bad_flags_are_refused_with_a_remedy(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse("", flags)


def test_bad_files_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'--loss.w_styles=1' is not a flag; the nearest is --loss.w_style"):
        parse("", [write(tmp_path, loss={"w_styles": 1})])
    with pytest.raises(ValueError, match=r"no section 'losses'; there are model, loss, training"):
        parse("", [write(tmp_path, losses={})])
    with pytest.raises(ValueError, match=r"training.num_epochs=null: this field needs a value"):
        parse("", [write(tmp_path, training={"num_epochs": None})])
    for text, message in ((b"{", "cannot be read as JSON"), (b"\xff", "cannot be read as JSON"), (b"[1]", "an object")):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ValueError, match=f"config_path=.*config.json.*{message}"):
            parse("", [f"--config_path={tmp_path / 'config.json'}"])
