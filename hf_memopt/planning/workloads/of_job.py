"""The workload of a spec: of a model, a policy, a file of arguments, or a recipe; and the step that the spec has."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_memopt.planning.job import Job
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.workload import Lever, Workload, check_accumulation
from hf_memopt.planning.workloads.robot_policies import PolicyFile, policy_file

# Recipes stand above this package; installed packages name theirs, such as train_lgt, under it.
_RECIPES = "hf_memopt.recipes"


def workload_of(spec: Job) -> Workload:
    """Return the workload that a spec describes, for `plan`.

    Raises:
        ValueError: the spec names nothing to train, or two things, or has a value that is not simulated.
    """
    if spec.is_of_recipe:
        return _of_recipe(spec)
    policy = policy_file(spec.model) if spec.model and not spec.is_of_trainer else None
    if policy is not None:
        return _of_policy(spec, policy)
    from hf_memopt.planning.workloads.trainer_workload import TrainerWorkload

    return TrainerWorkload(spec)


def given_step(spec: Job, workload: Workload) -> tuple[SimulatedStep, int]:
    """Return the step as the spec has it, and the forward passes of an update."""
    micro_batch = spec.batch_size or 1
    if spec.is_of_recipe:
        settings = {each.name: each.values[0] for each in workload.levers} | _chosen(spec.set, workload.levers)
        step = workload.simulated(settings, micro_batch)
    else:
        made: Any = workload  # of a trainer or of a policy
        micro_batch, step = made.micro_batch, made.as_given()
    passes = workload.effective_batch // (micro_batch * step.num_gpus)
    check_accumulation(spec.accumulation, passes, workload.effective_batch, micro_batch)
    return step, passes


def _of_policy(spec: Job, policy: PolicyFile) -> Workload:
    if find_spec("lerobot") is None:
        raise ValueError(
            f"model={spec.model!r} is a robot policy, which needs lerobot: pip install 'hf_memopt[lerobot]'"
        )
    from hf_memopt.planning.workloads.policy_workload import PolicyTraining

    return PolicyTraining(spec, policy)


def _of_recipe(spec: Job) -> Workload:
    if spec.engine or (spec.num_gpus or 1) > 1:
        raise ValueError(f"num_gpus={spec.num_gpus or 1}: recipes are simulated on one GPU; give num_gpus with a model")
    if spec.model is not None:
        asked = f"recipe={spec.recipe!r}" if spec.recipe else f"config={str(spec.config)!r}"
        raise ValueError(f"{asked} and model={spec.model!r}: name one of them")
    batch = spec.effective_batch
    if batch is None and spec.accumulation is not None:
        batch = (spec.batch_size or 1) * spec.accumulation
    name = spec.recipe
    if name is None and spec.config is not None:
        name = recipe_of(spec.config)
    return recipe_workload(name or "", spec.config, precision=spec.precision, effective_batch=batch)


def recipe_workload(name: str, config: Path | None, **options: Any) -> Workload:
    """Return the workload of, say, "train_lgt" or "lgt"; options that are None are left to the recipe."""
    recipe = name.removeprefix("train_")
    if recipe not in (known := _recipes()):
        raise ValueError(f"recipe={name!r} is not a recipe that can be simulated; choose from {', '.join(known)}")
    if config is None:
        raise ValueError(f"recipe={name!r} needs config=FILE, which it would be started with")
    given = {option: value for option, value in options.items() if value is not None}
    workload: Workload = known[recipe].load()(config, **given)
    return workload


def recipe_of(config: Path) -> str:
    """Return the recipe that a file's name begins with: `lgt_demo.json` is for `train_lgt`."""
    fitting = [recipe for recipe in _recipes() if f"{config.stem}_".startswith(f"{recipe}_")]
    if not fitting:
        raise ValueError(
            f"config={str(config)!r}: no recipe's name begins this file's; say which with recipe={'|'.join(_recipes())}"
        )
    return max(fitting, key=len)


@cache  # all installed packages are looked through
def _recipes() -> dict[str, EntryPoint]:
    """Return the functions that make recipes' workloads, by the recipes' names."""
    found = {each.name.removeprefix("train_"): each for each in entry_points(group=_RECIPES)}
    return dict(sorted(found.items()))


def _chosen(texts: Sequence[str], levers: Sequence[Lever]) -> dict[str, Any]:
    values = {(each.name, str(value)): value for each in levers for value in each.values}
    chosen = {}
    for text in texts:
        name, _, value = text.partition("=")
        if (name, value) not in values:
            known = "; ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in levers)
            raise ValueError(f"set={text!r} is not a value of a lever; there are {known}")
        chosen[name] = values[name, value]
    return chosen
