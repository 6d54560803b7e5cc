"""Finds what a command line asks to simulate."""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memopt.planning import Workload


def recipe_workload(name: str, config: Path | None, **options: Any) -> "Workload":
    """The workload of a recipe and its configuration file.

    Args:
        name: such as "train_lgt" or "lgt".
        config: what the recipe is started with.
        options: of the recipe's `workload`; those that are None are left to it.

    Raises:
        ValueError: there is no such recipe, or the file cannot be read.
    """
    module = f"hf_memopt.recipes.{name.removeprefix('train_')}_plan"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"recipe={name!r} is no recipe that can be simulated: there is no {module}")
    if config is None:
        raise ValueError(f"recipe={name!r} needs --config FILE, which it would be started with")
    if not config.is_file():
        raise ValueError(f"config={str(config)!r} is no file")
    given = {option: value for option, value in options.items() if value is not None}
    workload: Workload = importlib.import_module(module).workload(config, **given)
    return workload


def recipe_of(config: Path) -> str:
    """The recipe that a configuration file belongs to, by its name: `lgt_demo.json` is for `train_lgt`.

    Raises:
        ValueError: no recipe's name begins the file's.
    """
    words = config.stem.split("_")
    for length in range(len(words), 0, -1):
        name = "_".join(words[:length])
        if importlib.util.find_spec(f"hf_memopt.recipes.{name}_plan") is not None:
            return name
    raise ValueError(f"config={str(config)!r}: no recipe's name begins this file's; say which with --recipe NAME")
