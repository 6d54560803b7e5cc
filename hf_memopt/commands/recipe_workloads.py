"""Makes the workload that a command line asks to simulate."""

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memopt.jobs import Workload

_RECIPES = "hf_memopt.recipes"


def recipe_workload(name: str, config: Path | None, **options: Any) -> "Workload":
    """Return the workload of a recipe and its configuration file.

    Args:
        name: such as "train_lgt" or "lgt".
        config: the file that the recipe is started with.
        options: options of the recipe's `workload`; those that are None are left to it.

    Raises:
        ValueError: there is no such recipe, or the file cannot be read.
    """
    recipe = name.removeprefix("train_")
    if recipe not in _recipes():
        raise ValueError(f"recipe={name!r} is not a recipe that can be simulated; choose from {', '.join(_recipes())}")
    if config is None:
        raise ValueError(f"recipe={name!r} needs --config FILE, which it would be started with")
    if not config.is_file():
        raise ValueError(f"config={str(config)!r} is not a file")
    given = {option: value for option, value in options.items() if value is not None}
    workload: Workload = importlib.import_module(f"{_RECIPES}.{_recipes()[recipe]}.workload").workload(config, **given)
    return workload


def recipe_of(config: Path) -> str:
    """Return the recipe that a configuration file's name begins with: `lgt_demo.json` is for `train_lgt`.

    Raises:
        ValueError: no recipe's name begins the file's.
    """
    fitting = [recipe for recipe in _recipes() if f"{config.stem}_".startswith(f"{recipe}_")]
    if not fitting:
        raise ValueError(
            f"config={str(config)!r}: no recipe's name begins this file's; say which with --recipe "
            f"{'|'.join(_recipes())}"
        )
    return max(fitting, key=len)


def _recipes() -> dict[str, str]:
    """Return the recipes that can be simulated, and the package in which the parts of each are."""
    modules = list(pkgutil.iter_modules(importlib.import_module(_RECIPES).__path__))
    scripts = [module.name.removeprefix("train_") for module in modules if not module.ispkg]
    packages = [module.name for module in modules if module.ispkg]
    return {script: package for script in sorted(scripts) for package in packages if script.startswith(package)}
