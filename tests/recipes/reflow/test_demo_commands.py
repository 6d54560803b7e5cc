import subprocess
import sys
from pathlib import Path

import pytest

from hf_memopt.recipes.reflow import demo_commands as commands


def test_a_folder_in_use_is_refused_and_only_the_demos_own_files_are_replaced(tmp_path: Path) -> None:
    names = ("logs", "results.json")
    commands.make_room(tmp_path, names, overwrite=False)
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"already holds logs, results.json.*--overwrite"):
        commands.make_room(tmp_path, names, overwrite=False)
    commands.make_room(tmp_path, names, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "mine.txt"]


def test_the_parser_knows_folder_seed_and_overwrite() -> None:
    options = commands.demo_parser("words", "outputs/here").parse_args([])
    assert (options.output, options.seed, options.overwrite) == (Path("outputs/here"), 0, False)


def test_few_batches_are_logged_and_saved_once(tmp_path: Path) -> None:
    flags = commands.training_flags(tmp_path, steps=2, warmup_steps=0, seed=3)
    assert {f"--output_dir={tmp_path}", "--steps=2", "--save_freq=2", "--log_freq=1", "--seed=1003"} <= set(flags)
    assert f"--policy.optimizer_lr={commands.LEARNING_RATE}" in flags


def test_a_demo_may_name_its_learning_rate(tmp_path: Path) -> None:
    flags = commands.training_flags(tmp_path, steps=2, warmup_steps=0, seed=3, learning_rate=0.5)
    assert "--policy.optimizer_lr=0.5" in flags


def test_the_recipe_starts_on_the_students_folder(tmp_path: Path) -> None:
    words = commands.reflow_launch(tmp_path)
    assert words[:2] == ["accelerate", "launch"]
    assert words[-2:] == ["hf_memopt.recipes.reflow_smolvla", f"--policy.path={tmp_path}"]


def test_a_command_leaves_its_whole_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    python = Path(sys.executable).name
    bars = "print('Training:  50%| 1/2 [00:01]'); print('Training: 100%| 2/2 [00:02]'); print('the end')"
    text = commands.run(tmp_path, "said", [python, "-c", bars])
    assert text == (tmp_path / "logs" / "said.log").read_text()
    shown = capsys.readouterr().out
    assert shown.startswith(f"$ {python} -c ")
    assert "100%" in shown
    assert "the end" not in shown.split("\n", 1)[1]


def test_a_command_that_fails_ends_the_demo_and_names_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    python = Path(sys.executable).name
    with pytest.raises(SystemExit, match=rf"status 3; its whole output is in {tmp_path}/logs/broken.log"):
        commands.run(tmp_path, "broken", [python, "-c", "print('why'); raise SystemExit(3)"])
    assert (tmp_path / "logs" / "broken.log").read_text() == "why\n"


def test_demos_import_nothing_of_lerobot_before_its_warnings_are_silenced() -> None:
    seen = "import sys, hf_memopt.recipes.reflow.demo_commands; print('lerobot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
