import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from late_imports import LateModule
from plan_toys import smolvla, write_student
from printed_commands import run_in_shell

from hf_memopt.cli import main
from hf_memopt.planning import NothingFitsError, estimate_peak_memory
from hf_memopt.planning.simulation import DEVICE_TYPE

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
training_flags = LateModule("hf_memopt.lerobot.training_flags")
reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
reflow_smolvla_plan = LateModule("hf_memopt.recipes.reflow.workload")
teacher_home = LateModule("hf_memopt.recipes.reflow.workload")


@pytest.fixture(scope="module")
def student(toy_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student"), toy_vlm)


def test_the_precision_is_the_students_unless_another_is_asked_for(student: Path) -> None:
    assert reflow_smolvla_plan.workload(student).levers[-1].values == ("no",)
    assert reflow_smolvla_plan.workload(student, precision="auto").levers[-1].values == ("no", "bf16")


def test_a_student_is_found_by_its_folder_or_its_configuration(student: Path) -> None:
    by_folder, by_file = (reflow_smolvla_plan.workload(path) for path in (student, student / "config.json"))
    assert by_folder.options == by_file.options
    assert by_folder.options.path == student
    assert by_folder.effective_batch == 8
    with pytest.raises(ValueError, match="effective_batch=-1 must be at least 1"):
        reflow_smolvla_plan.workload(student, effective_batch=-1)


def test_a_teacher_is_no_student(student: Path) -> None:
    with pytest.raises(ValueError, match="a policy of type 'smolvla'; make a student with prepare-student"):
        reflow_smolvla_plan.workload(student.parent / "teacher")


@pytest.mark.parametrize(
    "fields",
    [
        {"use_reflow": False},
        {"couplings_path": "couplings"},
        {"couplings_seed": 3},
        {"reflow_target": "self", "reflow_real_data": 0.5},
        {"activation_offload": "all"},
        {"compile_model": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_training_that_is_not_simulated_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: such a training is not simulated, since "):
        smolvla(tmp_path, tmp_path, **fields)


def test_lerobot_reads_the_flags_of_a_reflow_plan(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = reflow_smolvla_plan.workload(student, effective_batch=12, precision="auto")
    settings = {"teacher_offload": "stream", "mixed_precision": "bf16"}
    folder = tmp_path / "a plan"
    written = workload.write(settings, 4, folder)
    accumulation, flags = reflow_smolvla.take_accumulation_flag(shlex.split(written[0].read_text()))
    others = ["--dataset.repo_id=local/none", f"--output_dir={tmp_path / 'run'}", "--policy.push_to_hub=false"]
    monkeypatch.setattr(sys, "argv", ["reflow_smolvla", *flags, *others])
    cfg = training_flags.read_training_flags()
    assert (cfg.batch_size, accumulation) == (4, 3)
    assert (cfg.policy.teacher_offload, cfg.policy.dtype) == ("stream", "bfloat16")
    assert cfg.policy.teacher_model_path == str(student.parent / "teacher")
    assert yaml.safe_load(written[1].read_text())["mixed_precision"] == "bf16"
    words = shlex.split(workload.command(written))
    assert words[:6] == ["xargs", "accelerate", "launch", "--config_file", str(written[1]), "-m"]
    assert words[6:] == [workload.MODULE, "--dataset.repo_id=DATASET", "--output_dir=FOLDER", "<", str(written[0])]


@pytest.mark.slow
def test_the_printed_command_trains(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    workload = reflow_smolvla_plan.workload(toy_student, effective_batch=4)
    written = workload.write({"teacher_offload": "swap", "mixed_precision": "no"}, 2, tmp_path / "plan")
    run = tmp_path / "run"
    data = f"--dataset.repo_id=local/toy --dataset.root={toy_dataset} --steps=2 --policy.push_to_hub=false"
    command = workload.command(written).replace("--dataset.repo_id=DATASET", data).replace("FOLDER", str(run))
    run_in_shell(tmp_path, command)
    assert (run / "checkpoints" / "last" / "pretrained_model" / "model.safetensors").is_file()


@pytest.mark.parametrize(("home", "share_prefix"), [("resident", "on"), ("swap", "off")])
@pytest.mark.slow
def test_euler_steps_that_are_not_run_change_no_byte(
    home: str, share_prefix: str, toy_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = smolvla(tmp_path, toy_vlm, share_prefix=share_prefix)
    step = workload.simulated({"teacher_offload": home, "mixed_precision": "no"}, 2)
    few = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu="rtx4090")
    monkeypatch.setattr("hf_memopt.recipes.reflow.workload._NUM_EULER_STEPS", 10)
    every = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu="rtx4090")
    for name in ("peak_bytes", "reserved_bytes", "host_bytes", "phases", "breakdown", "top", "assumptions"):
        assert getattr(few, name) == getattr(every, name), name
    assert len(few.trace.positions) < len(every.trace.positions)
    assert few.step_ms == pytest.approx(every.step_ms)
    assert few.phases_ms == pytest.approx(every.phases_ms)


def test_the_reflow_recipe_takes_its_own_plan_flag(student: Path) -> None:
    assert reflow_smolvla.take_flag("plan", ["--plan=4GiB", "--steps=4"]) == ("4GiB", ["--steps=4"])
    assert reflow_smolvla.take_flag("plan", ["--steps=4"]) == (None, ["--steps=4"])
    with pytest.raises(ValueError, match="plan='auto' needs an accelerator"):
        teacher_home.planned_home(reflow_run(student), 3, "auto")


@pytest.mark.slow
def test_the_reflow_recipe_plans_the_teachers_home_for_its_own_batch(
    student: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="hf_memopt"):
        assert teacher_home.planned_home(reflow_run(student), 3, "4GiB") in ("resident", "swap", "stream")
    assert "micro-batch 2 x 3" in caplog.text
    with pytest.raises(NothingFitsError, match="no settings of SmolVLA reflow of student fit"):
        teacher_home.planned_home(reflow_run(student), 3, "642MiB")


def reflow_run(student: Path) -> Any:
    """Return the fields of lerobot's configuration that a plan reads."""
    policy = policy_files.load_config(student)
    policy.pretrained_path = student
    return SimpleNamespace(policy=policy, batch_size=2)


@pytest.mark.slow
def test_a_student_is_planned_from_the_command_line(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan"
    flags = ["--recipe", "reflow_smolvla", "--gpu", "4GiB", "--effective-batch", "2", "--workers", "1"]
    assert main(["plan", "--config", str(student / "config.json"), *flags, "--output", str(output)]) == 0
    assert "--policy.teacher_offload=resident" in (output / "reflow_smolvla.flags").read_text()
    assert f"< {output / 'reflow_smolvla.flags'}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_student_is_trained_on_the_virtual_device_by_the_loop_of_lerobot(student: Path) -> None:
    simulated = reflow_smolvla_plan.workload(student, effective_batch=4).simulated(
        {"teacher_offload": "swap", "mixed_precision": "bf16"}, 2
    )

    def step(run: reflow_smolvla_plan.Run) -> None:
        state_proj = run.teacher.model.state_proj.weight
        assert {parameter.device for parameter in run.policy.parameters()} == {run.accelerator.device}
        assert (run.accelerator.device.type, state_proj.device.type) == (DEVICE_TYPE, "cpu")
        simulated.step(run)
        assert (run.accelerator.sync_gradients, state_proj.device.type) == (True, "cpu")
        assert all(parameter.grad is None for parameter in run.policy.parameters())

    estimate = estimate_peak_memory(simulated.setup, step)
    assert (simulated.num_micro_batches, estimate.unreached) == (2, ())
