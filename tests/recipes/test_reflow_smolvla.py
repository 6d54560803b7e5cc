"""The recipe: lerobot's flags, plus gradient accumulation that is exact and figures that say where memory goes."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lerobot_runs import PLAIN_SGD, PLUGIN, lerobot_train, logged, pin_draws, run, train_flags, weights
from patience import HANG_S
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.recipes import reflow_smolvla
from hf_memopt.recipes.reflow_smolvla import main as recipe
from hf_memopt.recipes.reflow_smolvla import take_accumulation_flag
from hf_memopt.report import read_run

REPOSITORY = Path(reflow_smolvla.__file__).parents[1]
ACCELERATE_SETTING = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# Sums of the same float32 gradients in another order, through four updates of size 0.02.
TOLERANCE = 2e-6


@pytest.fixture
def num_updates() -> Iterator[list[int]]:
    """Grows by one element at each real update of the weights."""
    updates: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: updates.append(1))
    yield updates
    handle.remove()


def largest_difference(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max((ours[name].float() - expected[name].float()).abs().max().item() for name in ours)


@pytest.fixture
def four_frame_batches(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """The student after two updates from four frames each, and from here on the same draws for the same frames."""
    pin_draws(monkeypatch)
    flags = train_flags(toy_student, toy_dataset, tmp_path / "whole", steps=2, batch_size=4)
    log = run(recipe, *flags, *PLAIN_SGD)
    assert max(logged(log, "grdn")) > 1  # so that clipping shows
    trained = weights(tmp_path / "whole")
    assert largest_difference(trained, weights(toy_student)) > 1e-3
    return trained


@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_accumulation_makes_the_update_of_the_large_batch(
    num_micro_batches: int,
    four_frame_batches: dict[str, Tensor],
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    num_updates: list[int],
) -> None:
    flags = train_flags(
        toy_student, toy_dataset, tmp_path / "run", steps=2 * num_micro_batches, batch_size=4 // num_micro_batches
    )
    run(recipe, *flags, *PLAIN_SGD, f"--gradient_accumulation_steps={num_micro_batches}")
    assert len(num_updates) == 2
    assert largest_difference(weights(tmp_path / "run"), four_frame_batches) < TOLERANCE


def test_setting_of_accelerates_launcher_counts(
    four_frame_batches: dict[str, Tensor],
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    num_updates: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And lerobot's own loop, under the same setting, is the control: it divides the loss and updates every batch."""
    monkeypatch.setenv(ACCELERATE_SETTING, "2")
    run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "recipe", steps=4), *PLAIN_SGD)
    assert len(num_updates) == 2
    assert largest_difference(weights(tmp_path / "recipe"), four_frame_batches) < TOLERANCE
    run(lerobot_train, PLUGIN, *train_flags(toy_student, toy_dataset, tmp_path / "lerobot", steps=4), *PLAIN_SGD)
    assert len(num_updates) == 2 + 4
    assert largest_difference(weights(tmp_path / "lerobot"), four_frame_batches) > 1e-4


def test_without_accumulation_the_recipe_is_lerobots_training(
    toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "recipe", steps=2))
    run(lerobot_train, PLUGIN, *train_flags(toy_student, toy_dataset, tmp_path / "lerobot", steps=2))
    assert largest_difference(weights(tmp_path / "recipe"), weights(tmp_path / "lerobot")) == 0


def test_windows_run_across_the_ends_of_epochs(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, num_updates: list[int]
) -> None:
    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=6, batch_size=16)  # an epoch is 3 batches
    log = run(recipe, *flags, *PLAIN_SGD, "--gradient_accumulation_steps=2")
    assert logged(log, "epch")[-1] == 2
    assert len(num_updates) == 3


@pytest.mark.parametrize(
    ("arguments", "by_launcher", "expected"),
    [
        (["--gradient_accumulation_steps=4", "--steps=8"], "2", (4, ["--steps=8"])),
        (["--gradient_accumulation_steps", "4", "--steps", "8"], None, (4, ["--steps", "8"])),
        (["--steps=8"], "2", (2, ["--steps=8"])),
        (["--steps=8"], None, (1, ["--steps=8"])),
    ],
)
def test_own_flag_wins_over_the_launchers(
    arguments: list[str], by_launcher: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ACCELERATE_SETTING, raising=False)
    if by_launcher is not None:
        monkeypatch.setenv(ACCELERATE_SETTING, by_launcher)
    assert take_accumulation_flag(arguments) == expected


def test_log_shows_the_norm_of_a_partial_sum(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    """Half the norm of the first batch's gradient, which is not clipped: its window goes on."""
    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    log = run(recipe, *flags, *PLAIN_SGD, "--gradient_accumulation_steps=2")
    control = run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "control", steps=2), *PLAIN_SGD)
    assert logged(log, "grdn")[0] == pytest.approx(logged(control, "grdn")[0] / 2, abs=2e-3)


def test_resume_with_accumulation_is_the_uninterrupted_run(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_draws(monkeypatch)
    window = "--gradient_accumulation_steps=2"
    run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "run", steps=4), "--save_freq=2", window)
    uninterrupted = weights(tmp_path / "run")
    halfway = tmp_path / "run" / "checkpoints" / "000002" / "pretrained_model"
    resume = (f"--config_path={halfway / 'train_config.json'}", "--resume=true")
    run(recipe, *resume, window)
    assert largest_difference(weights(tmp_path / "run"), uninterrupted) == 0
    with pytest.raises(ValueError, match=r"resumed at step 2, .*gradient_accumulation_steps=4"):
        run(recipe, *resume, "--gradient_accumulation_steps=4", "--save_freq=4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=3"], "steps=3 counts batches and is no multiple of gradient_accumulation_steps=2; use --steps=4"),
        (["--steps=8", "--save_freq=5"], "save_freq=5 counts batches .* use --save_freq=6"),
        (["--gradient_accumulation_steps=0"], "gradient_accumulation_steps=0 must be at least 1"),
        (["--gradient_accumulation_steps=two"], "gradient_accumulation_steps='two' is no whole number"),
    ],
)
def test_refuses_windows_that_do_not_fit(
    flags: list[str], message: str, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    given = [*flags, "--gradient_accumulation_steps=2", *train_flags(toy_student, toy_dataset, tmp_path / "r", steps=4)]
    with pytest.raises(ValueError, match=message):
        run(recipe, *_first_of_each(given))
    assert not (tmp_path / "r").exists()


def _first_of_each(flags: list[str]) -> list[str]:
    return list({flag.split("=")[0]: flag for flag in reversed(flags)}.values())


def test_refuses_another_policy(toy_teacher: Path, toy_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy type 'smolvla': this recipe trains smolvla_reflow; make a student"):
        run(recipe, *train_flags(toy_teacher, toy_dataset, tmp_path / "run", steps=1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [recipe, lerobot_train])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_decides_autocast(
    command: Callable[[], None],
    dtype: str,
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    forward = SmolVLAReflowPolicy.forward

    def watched(*arguments: object, **kwargs: object) -> object:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return forward(*arguments, **kwargs)

    monkeypatch.setattr(SmolVLAReflowPolicy, "forward", watched)
    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=1)
    run(command, PLUGIN, *flags, f"--policy.dtype={dtype}")
    assert seen == [getattr(torch, dtype)]
    before, after = weights(toy_student), weights(tmp_path / "run")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert not torch.equal(before["model.action_out_proj.weight"], after["model.action_out_proj.weight"])


def test_log_says_where_memory_goes(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    log = run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2))
    last = next(line for line in log.splitlines() if " step:2 " in line)
    for phase in ("prefix", "teacher", "forward", "backward", "optimizer"):
        assert re.search(rf"\b{phase}_rss_gib:(?!0\.000)\d+\.\d+", last), last
    timeline = read_run(tmp_path / "run").timeline
    assert [entry["step"] for entry in timeline] == [1, 2]
    assert timeline[-1]["memory/teacher_host_rss_gib"] > 0


def test_an_out_of_memory_error_names_the_flags_that_help(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(SmolVLAReflowPolicy, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(recipe, *train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2, batch_size=4))
    assert "--batch_size=2 --gradient_accumulation_steps=2 --steps=4: the same updates" in caught.value.__notes__[0]
    assert (tmp_path / "run" / "out_of_memory_rank0.txt").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(recipe, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--gradient_accumulation_steps=N" in text
    for flag in ("--batch_size", "--dataset.repo_id", "--save_freq", "--policy.type"):
        assert flag in text


@pytest.mark.slow
def test_accelerate_launches_the_script(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=1"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--gradient_accumulation_steps=2"]
    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    result = start([*launch, str(REPOSITORY / "recipes" / "reflow_smolvla.py"), *flags])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [int(step) for step in logged(result.stderr, "step")] == [1, 2]
    assert weights(tmp_path / "run").keys() == weights(toy_student).keys()


@pytest.mark.slow
def test_module_prints_help() -> None:
    result = start([sys.executable, "-m", "hf_memopt.recipes.reflow_smolvla", "--help"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--gradient_accumulation_steps=N" in result.stdout


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
