"""The recipes' plans: what they read, what they write, and that the recipes read it back."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerators
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from late_imports import LateModule
from plan_toys import causal_lm, fluxflow, lgt, lgt_config, neural_operator, smolvla, write_student

from hf_memopt.cli import main
from hf_memopt.estimate import estimate_peak_memory
from hf_memopt.estimate.simulation.device import DEVICE_TYPE
from hf_memopt.recipes.common.auto_plan import RecipeWorkload
from hf_memopt.recipes.lgt import config as lgt_config_module
from hf_memopt.recipes.lgt import plan as lgt_plan
from hf_memopt.tuning import NothingFitsError

policy_files = LateModule("hf_memopt.integrations.lerobot.policy_files")
training_flags = LateModule("hf_memopt.integrations.lerobot.training_flags")
reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
causal_lm_plan = LateModule("hf_memopt.recipes.causal_lm.plan")
fluxflow_options = LateModule("hf_memopt.recipes.fluxflow.options")
fluxflow_plan = LateModule("hf_memopt.recipes.fluxflow.plan")
neural_operator_options = LateModule("hf_memopt.recipes.neural_operator.options")
neural_operator_plan = LateModule("hf_memopt.recipes.neural_operator.plan")
reflow_smolvla_plan = LateModule("hf_memopt.recipes.reflow.plan")
teacher_home = LateModule("hf_memopt.recipes.reflow.teacher_home")

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
WORKLOADS = (causal_lm, fluxflow, lgt, neural_operator)
# Of each recipe: its plan, and its own parser of a file of options.
READERS: dict[str, tuple[Callable[..., RecipeWorkload], Callable[[Path], Any]]] = {
    "causal_lm": (causal_lm, lambda path: causal_lm_options.parse("", ["--config_path", str(path)])),
    "fluxflow": (fluxflow, lambda path: fluxflow_options.parse("", ["--config_path", str(path)])),
    "lgt": (lgt, lambda path: lgt_config_module.read_config("", ["--config_path", str(path)])),
    "neural_operator": (neural_operator, lambda path: neural_operator_options.parse("", ["--config_path", str(path)])),
}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Also on a machine with a GPU, and with nothing left over from other tests or for them."""
    with accelerators.on_the_cpu():
        yield


@pytest.fixture(scope="module")
def student(toy_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student"), toy_vlm)


def first_settings(workload: RecipeWorkload) -> dict[str, Any]:
    return {lever.name: lever.values[0] for lever in workload.levers}


def last_settings(workload: RecipeWorkload) -> dict[str, Any]:
    return {lever.name: lever.values[-1] for lever in workload.levers}


# ------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("plan_module", "file", "effective_batch"),
    [
        # It parses the whole standard library.
        pytest.param(causal_lm_plan, "causal_lm_demo.yaml", 8, marks=pytest.mark.slow),
        (fluxflow_plan, "fluxflow_demo.yaml", 4),
        (lgt_plan, "lgt.json", 64),
        (lgt_plan, "lgt_demo.json", 16),
        (neural_operator_plan, "neural_operator_demo.yaml", 32),
    ],
)
def test_shipped_configurations_are_read(plan_module: Any, file: str, effective_batch: int) -> None:
    workload = plan_module.workload(CONFIGS / file)
    assert workload.effective_batch == effective_batch
    assert [lever.name for lever in workload.levers][-1] == "mixed_precision"
    assert set(workload.LEVERS) == {lever.name for lever in workload.levers[:-1]}


def test_a_configuration_decides_the_precision_unless_another_is_asked_for(student: Path) -> None:
    def precisions(workload: RecipeWorkload) -> tuple[str, ...]:
        return workload.levers[-1].values

    assert precisions(lgt_plan.workload(CONFIGS / "lgt.json")) == ("bf16",)
    assert precisions(lgt_plan.workload(CONFIGS / "lgt.json", precision="no")) == ("no",)
    assert precisions(reflow_smolvla_plan.workload(student)) == ("no",)
    assert precisions(reflow_smolvla_plan.workload(student, precision="auto")) == ("no", "bf16")


@pytest.mark.parametrize("make", WORKLOADS)
def test_what_cannot_be_planned_for_is_refused(make: Callable[..., RecipeWorkload], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision='fp8' is unknown; choose from no, bf16, auto"):
        make(tmp_path, precision="fp8")
    with pytest.raises(ValueError, match="effective_batch=0 must be at least 1"):
        make(tmp_path, effective_batch=0)


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
        {"teacher_model_path": "self"},
        {"activation_offload": "all"},
        {"compile_model": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_training_that_is_not_simulated_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: such a training is not simulated, since "):
        smolvla(tmp_path, tmp_path, **fields)


# ------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("recipe", READERS)
def test_the_recipe_reads_what_was_written(recipe: str, tmp_path: Path) -> None:
    make, read = READERS[recipe]
    workload = make(tmp_path, effective_batch=6, precision="auto")
    for settings, micro_batch in ((first_settings(workload), 6), (last_settings(workload), 2)):
        folder = tmp_path / f"plan{micro_batch}"
        written = workload.write(settings, micro_batch, folder)
        assert read(written[0]) == workload.with_settings(settings, micro_batch)
        assert written[1] == folder / "accelerate.yaml"
        assert load_config_from_file(str(written[1])).mixed_precision == settings["mixed_precision"]
        command = workload.command(written)
        assert command.startswith(f"accelerate launch --config_file {written[1]} -m hf_memopt.recipes.train_{recipe} ")
        assert str(written[0]) in command


@pytest.mark.parametrize(
    "make", [causal_lm, neural_operator, *(pytest.param(make, marks=pytest.mark.slow) for make in (fluxflow, lgt))]
)
def test_a_plan_of_what_is_offloaded_has_settled_after_the_simulated_steps(
    make: Callable[..., RecipeWorkload], tmp_path: Path
) -> None:
    workload = make(tmp_path, "--offload_threshold_mb=0.001", effective_batch=4)
    step = workload.simulated(first_settings(workload) | {"activations": "offloaded where free"}, 2)
    assert step.num_steps < 4
    found, longer = (
        estimate_peak_memory(step.setup, step.step, num_steps=num_steps, gpu="1GiB")
        for num_steps in (step.num_steps, 4)
    )
    for name in ("peak_bytes", "reserved_bytes", "phases", "breakdown", "host_bytes"):
        assert getattr(found, name) == getattr(longer, name), name
    assert found.step_ms == pytest.approx(longer.step_ms, rel=0.01)  # a plan's copies may still move by a moment
    assert found.host_bytes > 0


def test_the_planned_batch_is_in_the_options(tmp_path: Path) -> None:
    assert causal_lm(tmp_path, effective_batch=6).batching(2) == {
        "training.per_device_batch_size": 2,
        "training.gradient_accumulation_steps": 3,
    }
    assert lgt_plan.LatentTransferWorkload(lgt_config(), effective_batch=6).batching(2) == {
        "training.batch_size": 2,
        "training.accumulation_steps": 3,
    }
    for make in (fluxflow, neural_operator):
        workload = make(tmp_path, effective_batch=6)
        assert workload.batching(2) == {"training.batch_size": 6, "training.micro_batch_size": 2}
        assert workload.batching(6) == {"training.batch_size": 6, "training.micro_batch_size": 0}


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


@pytest.mark.parametrize(("home", "share_prefix"), [("resident", "on"), ("swap", "off")])
def test_euler_steps_that_are_not_run_change_no_byte(
    home: str, share_prefix: str, toy_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = smolvla(tmp_path, toy_vlm, share_prefix=share_prefix)
    step = workload.simulated({"teacher_offload": home, "mixed_precision": "no"}, 2)
    few = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu="rtx4090")
    monkeypatch.setattr("hf_memopt.recipes.reflow.plan._NUM_EULER_STEPS", 10)
    every = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu="rtx4090")
    for name in ("peak_bytes", "reserved_bytes", "host_bytes", "phases", "breakdown", "top", "assumptions"):
        assert getattr(few, name) == getattr(every, name), name
    assert len(few.trace.positions) < len(every.trace.positions)
    assert few.step_ms == pytest.approx(every.step_ms)
    assert few.phases_ms == pytest.approx(every.phases_ms)


# ------------------------------------------------------------------------------------------------------ planning


def test_a_recipe_is_planned_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "neural_operator_small.yaml"
    sections = {
        "model": {"modes": 6, "hidden_channels": 8},
        "training": {"batch_size": 1},
        "offload": {"offload": "off"},
    }
    config.write_text(yaml.safe_dump(sections))
    output = tmp_path / "plan"
    assert main(["plan", "--config", str(config), "--gpu", "4GiB", "--output", str(output), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    options = neural_operator_options.parse("", ["--config_path", str(output / "neural_operator.yaml")])
    assert (options.training.batch_size, options.training.micro_batch_size) == (1, 0)
    assert options.offload.offload == "off"
    assert f"wrote {output / 'accelerate.yaml'}" in printed
    assert f"-m hf_memopt.recipes.train_neural_operator --config_path {output / 'neural_operator.yaml'}" in printed


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
    """What the recipe reads of lerobot's configuration for a plan: batches of 2."""
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
