import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from late_imports import LateModule
from patience import HANG_S
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_memopt.report import read_run
from hf_memopt.training import NonFiniteGradientError

pytestmark = pytest.mark.e2e

runs = LateModule("lerobot_runs")
modeling = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
loop = LateModule("hf_memopt.recipes.reflow.lerobot_loop")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")

REPOSITORY = Path(__file__).parents[2]
ACCELERATE_SETTING = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# For sums of the same float32 gradients in another order, over four updates of size 0.02.
TOLERANCE = 2e-6


@pytest.fixture
def num_updates() -> Iterator[list[int]]:
    """A list that grows at each real update of the weights."""
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
    """The student after two updates from four frames each. All later draws depend only on the frames."""
    runs.pin_draws(monkeypatch)
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "whole", steps=2, batch_size=4)
    log = runs.run(recipe.main, *flags, *runs.PLAIN_SGD)
    assert max(runs.logged(log, "grdn")) > 1  # so that clipping has an effect
    trained = runs.weights(tmp_path / "whole")
    assert largest_difference(trained, runs.weights(toy_student)) > 1e-3
    return trained


@pytest.mark.parametrize("num_micro_batches", [2, 4])
@pytest.mark.sweep(share=0.5)
def test_accumulation_makes_the_update_of_the_large_batch(
    num_micro_batches: int,
    four_frame_batches: dict[str, Tensor],
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    num_updates: list[int],
) -> None:
    flags = runs.train_flags(
        toy_student, toy_dataset, tmp_path / "run", steps=2 * num_micro_batches, batch_size=4 // num_micro_batches
    )
    runs.run(recipe.main, *flags, *runs.PLAIN_SGD, f"--gradient_accumulation_steps={num_micro_batches}")
    assert len(num_updates) == 2
    assert largest_difference(runs.weights(tmp_path / "run"), four_frame_batches) < TOLERANCE


def test_setting_of_accelerates_launcher_counts(
    four_frame_batches: dict[str, Tensor],
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    num_updates: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with lerobot's own loop, which divides the loss but updates every batch."""
    monkeypatch.setenv(ACCELERATE_SETTING, "2")
    runs.run(recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "recipe", steps=4), *runs.PLAIN_SGD)
    assert len(num_updates) == 2
    assert largest_difference(runs.weights(tmp_path / "recipe"), four_frame_batches) < TOLERANCE
    control = [runs.PLUGIN, *runs.train_flags(toy_student, toy_dataset, tmp_path / "lerobot", steps=4), *runs.PLAIN_SGD]
    if loop.LOOP_ACCUMULATES:
        with pytest.raises(RuntimeError, match=ACCELERATE_SETTING):
            runs.run(runs.lerobot_train, *control)
        return
    runs.run(runs.lerobot_train, *control)
    assert len(num_updates) == 2 + 4
    assert largest_difference(runs.weights(tmp_path / "lerobot"), four_frame_batches) > 1e-4


def test_without_accumulation_the_recipe_is_lerobots_training(
    toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    runs.run(recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "recipe", steps=2))
    runs.run(
        runs.lerobot_train, runs.PLUGIN, *runs.train_flags(toy_student, toy_dataset, tmp_path / "lerobot", steps=2)
    )
    assert largest_difference(runs.weights(tmp_path / "recipe"), runs.weights(tmp_path / "lerobot")) == 0


def test_windows_run_across_the_ends_of_epochs(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, num_updates: list[int]
) -> None:
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=6, batch_size=6)
    three_batches = "--dataset.episodes=[0,1,2]"  # in an epoch
    log = runs.run(recipe.main, *flags, three_batches, *runs.PLAIN_SGD, "--gradient_accumulation_steps=2")
    assert runs.logged(log, "epch")[-1] == 2
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
    assert recipe.take_accumulation_flag(arguments) == expected


def test_log_shows_the_norm_of_a_partial_sum(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    """Check for half the norm of the first batch's gradient, unclipped inside a window. lerobot 0.6.2 logs no norm."""
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    log = runs.run(recipe.main, *flags, *runs.PLAIN_SGD, "--gradient_accumulation_steps=2")
    control = runs.run(
        recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "control", steps=2), *runs.PLAIN_SGD
    )
    partial = 0 if loop.LOOP_ACCUMULATES else runs.logged(control, "grdn")[0] / 2
    assert runs.logged(log, "grdn")[0] == pytest.approx(partial, abs=2e-3)


def test_resume_with_accumulation_is_the_uninterrupted_run(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.pin_draws(monkeypatch)
    window = "--gradient_accumulation_steps=2"
    runs.run(
        recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=4), "--save_freq=2", window
    )
    uninterrupted = runs.weights(tmp_path / "run")
    halfway = tmp_path / "run" / "checkpoints" / "000002" / "pretrained_model"
    resume = (f"--config_path={halfway / 'train_config.json'}", "--resume=true")
    runs.run(recipe.main, *resume, window)
    assert largest_difference(runs.weights(tmp_path / "run"), uninterrupted) == 0
    refusal = (
        "steps=2 differ; pass one" if loop.LOOP_ACCUMULATES else r"resumed at step 2, .*gradient_accumulation_steps=4"
    )
    with pytest.raises(ValueError, match=refusal):
        runs.run(recipe.main, *resume, "--gradient_accumulation_steps=4", "--save_freq=4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=3"], "steps=3 counts batches and is not a multiple of gradient_accumulation_steps=2; use --steps=4"),
        (["--steps=8", "--save_freq=5"], "save_freq=5 counts batches .* use --save_freq=6"),
        (["--gradient_accumulation_steps=0"], "gradient_accumulation_steps=0 must be at least 1"),
        (["--gradient_accumulation_steps=two"], "gradient_accumulation_steps='two' is not a whole number"),
    ],
)
def test_refuses_windows_that_do_not_fit(
    flags: list[str], message: str, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    given = [
        *flags,
        "--gradient_accumulation_steps=2",
        *runs.train_flags(toy_student, toy_dataset, tmp_path / "r", steps=4),
    ]
    with pytest.raises(ValueError, match=message):
        runs.run(recipe.main, *_first_of_each(given))
    assert not (tmp_path / "r").exists()


def _first_of_each(flags: list[str]) -> list[str]:
    return list({flag.split("=")[0]: flag for flag in reversed(flags)}.values())


@pytest.mark.parametrize("start", ["--policy.path={}", "--policy.type=smolvla"])
@pytest.mark.parametrize("reflow", [[], ["--policy.use_reflow=true", "--policy.teacher_model_path={}"]])
def test_a_plain_smolvla_is_refused_with_the_command_that_makes_a_student(
    start: str, reflow: list[str], toy_teacher: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    given = [flag.format(toy_teacher) for flag in (start, *reflow)]
    named = toy_teacher if str(toy_teacher) in " ".join(given) else "<your fine-tuned smolvla>"
    with pytest.raises(ValueError, match="policy type 'smolvla': this recipe trains smolvla_reflow, which") as caught:
        runs.run(recipe.main, *given, *runs.train_flags(toy_teacher, toy_dataset, tmp_path / "run", steps=1)[1:])
    assert f"`hf-memopt prepare-student --teacher {named} --output outputs/student_init`" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def from_random_weights(toy_teacher: Path, toy_vlm: Path, toy_dataset: Path, tmp_path: Path) -> list[str]:
    """Flags of a student that has the teacher's architecture, with random weights."""
    architecture = [flag.replace("=smolvla", "=smolvla_reflow") for flag in toy.policy_flags(toy_vlm)]
    reflow = ["--policy.use_reflow=true", f"--policy.teacher_model_path={toy_teacher}"]
    return [*architecture, *reflow, *runs.train_flags(toy_teacher, toy_dataset, tmp_path / "run", steps=1)[1:]]


@pytest.mark.parametrize("command", ["recipe", "lerobot"])
def test_a_student_of_random_weights_is_refused(
    command: str, from_random_weights: list[str], toy_teacher: Path, tmp_path: Path
) -> None:
    refusal = f"would start from random weights, .*prepare-student --teacher {toy_teacher} .*from_scratch"
    with pytest.raises(ValueError, match=refusal):
        runs.run(recipe.main if command == "recipe" else runs.lerobot_train, *from_random_weights)
    assert not (tmp_path / "run").exists()


def test_a_student_of_random_weights_that_was_asked_for_trains(from_random_weights: list[str]) -> None:
    asked = [*from_random_weights, "--policy.from_scratch=true"]
    with pytest.raises(ValueError, match="plan=8GiB simulates the student that --policy"):
        runs.run(recipe.main, *asked, "--plan=8GiB")
    assert len(runs.logged(runs.run(recipe.main, *asked), "loss")) == 1


@pytest.mark.parametrize("command", ["recipe", "lerobot"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_decides_autocast(
    command: str,
    dtype: str,
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    losses = modeling.SmolVLAReflowPolicy._losses

    def watched(*arguments: object) -> object:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return losses(*arguments)

    monkeypatch.setattr(modeling.SmolVLAReflowPolicy, "_losses", watched)
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=1)
    runs.run(recipe.main if command == "recipe" else runs.lerobot_train, runs.PLUGIN, *flags, f"--policy.dtype={dtype}")
    assert seen == [getattr(torch, dtype)]
    before, after = runs.weights(toy_student), runs.weights(tmp_path / "run")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert not torch.equal(before["model.action_out_proj.weight"], after["model.action_out_proj.weight"])


def test_log_says_where_memory_goes(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    log = runs.run(recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2))
    last = next(line for line in log.splitlines() if " step:2 " in line)
    for phase in ("prefix", "teacher", "forward", "backward", "optimizer"):
        assert re.search(rf" memory/{phase}_host_rss_gib:(?!0\.000)\d+\.\d+", last), last
    timeline = read_run(tmp_path / "run").timeline
    assert [entry["step"] for entry in timeline] == [1, 2]
    assert timeline[-1]["memory/teacher_host_rss_gib"] > 0
    assert timeline[-1]["memory/teacher_own_gib"] > 0


@pytest.mark.parametrize("flag", ["--plan=8GiB", "--policy.teacher_offload=auto"])
def test_the_home_that_was_chosen_is_the_teachers(
    flag: str, toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the run, its checkpoint, and a run resumed from the checkpoint."""
    for choice in ("planned_home", "decided_home"):
        monkeypatch.setattr(f"hf_memopt.recipes.reflow_smolvla.{choice}", lambda cfg, *others: "swap")
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    assert "teacher: swap; swap was asked for" in runs.run(recipe.main, *flags, "--save_freq=1", flag)
    first = tmp_path / "run" / "checkpoints" / "000001" / "pretrained_model"
    assert json.loads((first / "config.json").read_text())["teacher_offload"] == "swap"
    resumed = runs.run(recipe.main, f"--config_path={first / 'train_config.json'}", "--resume=true", flag)
    assert "teacher: swap; swap was asked for" in resumed


def test_training_that_diverges_stops_and_keeps_the_checkpoint_before(
    toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=3, batch_size=2)
    with pytest.raises(NonFiniteGradientError, match=r"loss at step 2\..*\n  rank 0, micro-batch 1: loss, "):
        runs.run(recipe.main, *flags, "--policy.optimizer_lr=1e25", "--save_freq=1")
    assert all(value.isfinite().all() for value in runs.weights(tmp_path / "run").values())


def test_an_out_of_memory_error_names_the_flags_that_help(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(modeling.SmolVLAReflowPolicy, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        runs.run(recipe.main, *runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2, batch_size=4))
    halved = "--batch_size=2 --gradient_accumulation_steps=2 --steps=4 --policy.scheduler_warmup_steps=2000 "
    halved += "--policy.scheduler_decay_steps=60000: updates of the same samples"
    assert halved in caught.value.__notes__[0]
    assert "--policy.activation_offload=auto" in caught.value.__notes__[0]
    assert (tmp_path / "run" / "out_of_memory_rank0.txt").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        runs.run(recipe.main, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--gradient_accumulation_steps=N" in text
    for flag in ("--batch_size", "--dataset.repo_id", "--save_freq", "--policy.type"):
        assert flag in text


@pytest.mark.slow
def test_accelerate_launches_the_script(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=1"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--gradient_accumulation_steps=2"]
    flags = runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2)
    result = start([*launch, str(REPOSITORY / "recipes" / "reflow_smolvla.py"), *flags])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [int(step) for step in runs.logged(result.stderr, "step")] == [1, 2]
    assert runs.weights(tmp_path / "run").keys() == runs.weights(toy_student).keys()


@pytest.mark.slow
def test_module_prints_help() -> None:
    result = start([sys.executable, "-m", "hf_memopt.recipes.reflow_smolvla", "--help"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--gradient_accumulation_steps=N" in result.stdout


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
