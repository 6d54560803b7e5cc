import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from late_imports import LateModule
from plan_toys import causal_lm, fluxflow, lgt, lgt_config, neural_operator
from printed_commands import run_printed

from hf_memopt.cli import main
from hf_memopt.planning import estimate_peak_memory
from hf_memopt.recipes.common.auto_plan import RecipeWorkload
from hf_memopt.recipes.lgt import options as lgt_options
from hf_memopt.recipes.lgt import workload as lgt_plan

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]

causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
causal_lm_plan = LateModule("hf_memopt.recipes.causal_lm.workload")
fluxflow_options = LateModule("hf_memopt.recipes.fluxflow.options")
fluxflow_plan = LateModule("hf_memopt.recipes.fluxflow.workload")
neural_operator_options = LateModule("hf_memopt.recipes.neural_operator.options")
neural_operator_plan = LateModule("hf_memopt.recipes.neural_operator.workload")

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
WORKLOADS = (causal_lm, fluxflow, lgt, neural_operator)
# Plans, and the recipes' own parsers of options.
READERS: dict[str, tuple[Callable[..., RecipeWorkload], Callable[[Path], Any]]] = {
    "causal_lm": (causal_lm, lambda path: causal_lm_options.parse("", ["--config_path", str(path)])),
    "fluxflow": (fluxflow, lambda path: fluxflow_options.parse("", ["--config_path", str(path)])),
    "lgt": (lgt, lambda path: lgt_options.parse("", ["--config_path", str(path)])),
    "neural_operator": (neural_operator, lambda path: neural_operator_options.parse("", ["--config_path", str(path)])),
}


def first_settings(workload: RecipeWorkload) -> dict[str, Any]:
    return {lever.name: lever.values[0] for lever in workload.levers}


def last_settings(workload: RecipeWorkload) -> dict[str, Any]:
    return {lever.name: lever.values[-1] for lever in workload.levers}


# ------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("plan_module", "file", "effective_batch"),
    [
        # The recipe parses the whole standard library.
        pytest.param(causal_lm_plan, "causal_lm_demo.yaml", 8, marks=pytest.mark.slow),
        (fluxflow_plan, "fluxflow_demo.yaml", 4),
        (lgt_plan, "lgt.json", 64),
        (lgt_plan, "lgt_demo.json", 16),
        (neural_operator_plan, "neural_operator_demo.yaml", 32),
    ],
)
@pytest.mark.sweep(share=0.4)
def test_shipped_configurations_are_read(plan_module: Any, file: str, effective_batch: int) -> None:
    workload = plan_module.workload(CONFIGS / file)
    assert workload.effective_batch == effective_batch
    assert [lever.name for lever in workload.levers][-1] == "mixed_precision"
    assert set(workload.LEVERS) == {lever.name for lever in workload.levers[:-1]}


def test_a_configuration_decides_the_precision_unless_another_is_asked_for() -> None:
    def precisions(**options: str) -> tuple[str, ...]:
        return lgt_plan.workload(CONFIGS / "lgt.json", **options).levers[-1].values

    assert precisions() == ("bf16",)
    assert precisions(precision="no") == ("no",)


@pytest.mark.parametrize("make", WORKLOADS)
def test_what_cannot_be_planned_for_is_refused(make: Callable[..., RecipeWorkload], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision='fp8' is unknown; choose from no, bf16, auto"):
        make(tmp_path, precision="fp8")
    with pytest.raises(ValueError, match="effective_batch=0 must be at least 1"):
        make(tmp_path, effective_batch=0)


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


@pytest.mark.parametrize("make", [causal_lm, neural_operator, fluxflow, lgt])
@pytest.mark.slow
def test_a_plan_of_what_is_offloaded_has_settled_after_the_simulated_steps(
    make: Callable[..., RecipeWorkload], tmp_path: Path
) -> None:
    # With such small operations passes may exceed the default slowdown, after which plans are made for less.
    flags = "--offload_threshold_mb=0.001", "--max_slowdown=0.5"
    workload = make(tmp_path, *flags, effective_batch=4)
    step = workload.simulated(first_settings(workload) | {"activations": "offloaded where free"}, 2)
    assert step.num_steps < 6
    found, longer = (
        estimate_peak_memory(step.setup, step.step, num_steps=num_steps, gpu="1GiB@rtx4070")
        for num_steps in (step.num_steps, 6)
    )
    for name in ("peak_bytes", "reserved_bytes", "phases", "breakdown", "host_bytes"):
        assert getattr(found, name) == getattr(longer, name), name
    assert found.step_ms == pytest.approx(longer.step_ms, rel=0.01)  # a plan's copies may still shift slightly
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
    assert f"Run it with the files in {output}" in printed
    assert (output / "accelerate.yaml").exists()
    assert f"-m hf_memopt.recipes.train_neural_operator --config_path {output / 'neural_operator.yaml'}" in printed


def test_train_causal_lm_is_planned_with_a_home_for_the_state(tmp_path: Path) -> None:
    workload = causal_lm(tmp_path, effective_batch=4)
    plain, host, file = (
        estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps)
        for home in ("off", "host", "file")
        for step in [workload.simulated(first_settings(workload) | {"optimizer_home": home}, 2)]
    )
    assert host.host_bytes - plain.host_bytes > 0.9 * plain.breakdown["optimizer state"] - 2**14
    assert file.disk_bytes_written == file.disk_bytes > 0 == host.disk_bytes
    assert workload.levers[1].without_disk().values == ("off", "host", "host, weights too")


# Flags of a short run, and the file of the trained weights.
SHORT = {
    "causal_lm": (("--max_steps=2",), "model.safetensors"),
    "fluxflow": (("--max_steps=2",), "*.safetensors"),
    "lgt": (("--training.num_epochs=1",), "model.safetensors"),
    "neural_operator": (("--epochs=1", "--num_train=16", "--num_test=8"), "model_state_dict.pt"),
}


@pytest.mark.parametrize("recipe", SHORT)
@pytest.mark.sweep(share=0.4)
def test_the_printed_command_trains(recipe: str, tmp_path: Path) -> None:
    flags, weights = SHORT[recipe]
    folder = "--checkpoint.save_dir" if recipe == "lgt" else "--output_dir"
    workload = READERS[recipe][0](tmp_path, *flags, f"{folder}={tmp_path / 'run'}", effective_batch=4)
    written = workload.write(last_settings(workload), 2, tmp_path / "plan")
    run_printed(shlex.split(workload.command(written)))
    assert list((tmp_path / "run").rglob(weights))
