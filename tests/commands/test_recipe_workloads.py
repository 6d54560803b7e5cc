"""Recipes are found by their names, their files' names and what is installed; the rest is refused with the choices."""

from pathlib import Path

import pytest

from hf_memopt.commands.recipe_workloads import recipe_of, recipe_workload

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
CHOICES = ("causal_lm", "fluxflow", "lgt", "neural_operator", "reflow_smolvla", "sft")


@pytest.mark.parametrize("name", ["train_lgt", "lgt"])
def test_a_recipe_is_found_with_and_without_its_prefix_and_gets_what_is_given(name: str) -> None:
    config = CONFIGS / "lgt.json"
    own = recipe_workload(name, config, precision=None, effective_batch=None)
    assert type(own).__module__ == "hf_memopt.recipes.lgt.workload"
    other = recipe_workload(name, config, precision=None, effective_batch=2 * own.effective_batch)
    assert other.effective_batch == 2 * own.effective_batch


@pytest.mark.parametrize("name", ["train_nothing", "common", "landscapes", "reflow", "", "../lgt", "train_train_lgt"])
def test_what_is_no_recipe_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^recipe='{name}' is not a recipe .*; choose from {', '.join(CHOICES)}$"):
        recipe_workload(name, CONFIGS / "lgt.json")


def test_a_configuration_is_needed_and_has_to_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^recipe='train_lgt' needs --config FILE"):
        recipe_workload("train_lgt", None)
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=rf"^config='{path}' is not a file$"):
            recipe_workload("lgt", path)


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
        assert recipe_of(config) == recipe
        return
    with pytest.raises(
        ValueError, match=rf"^config='{config}': no recipe's name begins .* --recipe {'.'.join(CHOICES)}$"
    ):
        recipe_of(config)


def test_each_demo_names_its_recipe() -> None:
    assert {recipe_of(config) for config in CONFIGS.glob("*.*")} == {
        "causal_lm",
        "fluxflow",
        "lgt",
        "neural_operator",
        "sft",
    }
