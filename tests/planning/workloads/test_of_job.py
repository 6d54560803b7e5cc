"""The way from a spec to a model, a file of arguments, or a recipe by its name or its file's."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule

from hf_memopt.planning import Job

workloads = LateModule("hf_memopt.planning.workloads.of_job")

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"
CHOICES = ("causal_lm", "fluxflow", "lgt", "neural_operator", "reflow_smolvla", "sft")


@pytest.mark.parametrize(
    ("batches", "effective_batch"),
    [
        ({}, 16),
        ({"batch_size": 3}, 6),
        ({"batch_size": 3, "accumulation": 2}, 12),
        ({"effective_batch": 8}, 8),
        ({"effective_batch": 8, "batch_size": 2, "accumulation": 2}, 8),
    ],
)
def test_the_samples_of_a_models_update(batches: dict[str, int], effective_batch: int, qwen3: str) -> None:
    spec = Job(qwen3, seq_len=32, num_gpus=2, **batches)
    model = workloads.workload_of(spec)
    assert model.effective_batch == effective_batch
    step, passes = workloads.given_step(spec, model)
    assert passes * model.micro_batch * step.num_gpus == effective_batch


def test_two_numbers_of_passes_are_refused(qwen3: str) -> None:
    spec = Job(qwen3, seq_len=32, effective_batch=8, batch_size=2, accumulation=3)
    with pytest.raises(ValueError, match=r"^accumulation=3: effective_batch=8 has 4 passes of batch_size=2; leave one"):
        workloads.given_step(spec, workloads.workload_of(spec))


def test_a_models_options_are_the_specs(qwen3: str) -> None:
    spec = Job(qwen3, seq_len=32, max_grad_norm="none", dtype="bfloat16", optimizer="sgd")
    made: Any = workloads.workload_of(spec)
    model = made.given.options
    assert (model.seq_len, model.max_grad_norm, model.dtype, model.optimizer) == (32, None, "bfloat16", "sgd")
    assert (model.precision, model.images_per_sample) == ("bf16", 1)


def test_a_files_update_has_the_specs_samples(qwen3: str, tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"per_device_train_batch_size": 2}))
    spec = Job(qwen3, training_args=tmp_path / "args.yaml", seq_len=16, effective_batch=8, batch_size=1)
    step, passes = workloads.given_step(spec, workloads.workload_of(spec))
    assert (step.num_micro_batches, passes) == (2, 8)
    spec = Job(qwen3, training_args=tmp_path / "args.yaml", seq_len=16, effective_batch=3)
    with pytest.raises(ValueError, match=r"^effective_batch=3 must be a multiple of per_device_train_batch_size=2$"):
        workloads.given_step(spec, workloads.workload_of(spec))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "^name a MODEL"),
        ({"model": "x", "recipe": "lgt", "config": CONFIGS / "lgt.json"}, "^recipe='lgt' and model='x': name one"),
        ({"model": "x", "config": CONFIGS / "lgt.json"}, "^config='.*' and model='x': name one"),
        ({"config": CONFIGS / "lgt.json", "num_gpus": 2}, "^num_gpus=2: recipes are simulated on one GPU"),
        ({"config": CONFIGS / "lgt.json", "engine": "ddp"}, "^num_gpus=1: recipes are simulated on one GPU"),
    ],
)
def test_a_spec_names_one_thing_to_train(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workloads.workload_of(Job(**said))


def test_a_recipe_is_named_by_its_file_and_takes_precision_and_samples() -> None:
    recipe = workloads.workload_of(Job(config=CONFIGS / "lgt.json", precision="auto", batch_size=8, accumulation=4))
    assert type(recipe).__module__ == "hf_memopt.recipes.lgt.workload"
    assert recipe.effective_batch == 32
    assert [each.values for each in recipe.levers if each.name == "mixed_precision"] == [("no", "bf16")]


@pytest.mark.parametrize("name", ["train_lgt", "lgt"])
def test_a_recipe_is_found_with_and_without_its_prefix_and_gets_what_is_given(name: str) -> None:
    config = CONFIGS / "lgt.json"
    own = workloads.recipe_workload(name, config, precision=None, effective_batch=None)
    assert type(own).__module__ == "hf_memopt.recipes.lgt.workload"
    other = workloads.recipe_workload(name, config, precision=None, effective_batch=2 * own.effective_batch)
    assert other.effective_batch == 2 * own.effective_batch


@pytest.mark.parametrize("name", ["train_nothing", "common", "landscapes", "reflow", "", "../lgt", "train_train_lgt"])
def test_what_is_no_recipe_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^recipe='{name}' is not a recipe .*; choose from {', '.join(CHOICES)}$"):
        workloads.recipe_workload(name, CONFIGS / "lgt.json")


def test_a_configuration_is_needed_and_has_to_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^recipe='train_lgt' needs config=FILE"):
        workloads.recipe_workload("train_lgt", None)
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=rf"^config='{path}': there is no such file"):
            workloads.recipe_workload("lgt", path)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("lgt.json", "lgt"),
        ("lgt_240.json", "lgt"),
        ("causal_lm_demo.yaml", "causal_lm"),
        ("reflow_smolvla.x.json", None),
        ("reflow_smolvla_small.json", "reflow_smolvla"),
        ("lgtx.json", None),
        ("my_lgt.json", None),
        ("train_lgt.json", None),
    ],
)
def test_a_files_name_begins_with_its_recipes(name: str, recipe: str | None) -> None:
    config = Path("folder_of_lgt") / name
    if recipe is not None:
        assert workloads.recipe_of(config) == recipe
        return
    with pytest.raises(
        ValueError, match=rf"^config='{config}': no recipe's name begins .* recipe={'.'.join(CHOICES)}$"
    ):
        workloads.recipe_of(config)


def test_each_demo_names_its_recipe() -> None:
    assert {workloads.recipe_of(config) for config in CONFIGS.glob("*.*")} == {
        "causal_lm",
        "fluxflow",
        "lgt",
        "neural_operator",
        "sft",
    }
