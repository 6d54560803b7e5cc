"""Tests that every operator and module of torch's databases gives the plain bits when offloaded in every mode."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import hypothesis
import pytest
import torch
from chosen_operations import ALWAYS_MODULES, ALWAYS_OPERATORS, MODULES, NOT_IN_EACH_TORCH, OPERATORS, SEED, chosen
from known_obstacles import MODULE_OBSTACLES, OPERATOR_OBSTACLES, faults_of
from offload_variants import try_everything
from operation_cases import DTYPES, Case, module_cases, module_names, operator_cases, operator_names

# torch's warnings about its own samples, such as deprecated ones.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 2


@pytest.mark.parametrize("name", chosen(OPERATORS, ALWAYS_OPERATORS), ids=lambda name: f"{name}-seed{SEED}")
@pytest.mark.sweep(share=0.15)
def test_an_operator(name: str) -> None:
    skip_without(name, operator_names)
    assert not faults(
        some_cases(operator_cases, name, ALWAYS_OPERATORS), OPERATOR_OBSTACLES.get(name, ()), is_whole=False
    )


@pytest.mark.parametrize("name", chosen(MODULES, ALWAYS_MODULES), ids=lambda name: f"{name}-seed{SEED}")
@pytest.mark.sweep(share=0.25)
def test_a_module(name: str) -> None:
    skip_without(name, module_names)
    cases = some_cases(module_cases, name, ALWAYS_MODULES)
    assert not faults(cases, MODULE_OBSTACLES.get(name, ()), is_whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_in_whole(name: str) -> None:
    skip_without(name, operator_names)
    assert not faults(operator_cases(name, NUM_SAMPLES), OPERATOR_OBSTACLES.get(name, ()), is_whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_whole(name: str) -> None:
    skip_without(name, module_names)
    assert not faults(module_cases(name, NUM_SAMPLES), MODULE_OBSTACLES.get(name, ()), is_whole=True)


@pytest.mark.canary
def test_the_lists_of_names_are_complete() -> None:
    """Check the names of a new release of torch; correct operators.txt, modules.txt and `NOT_IN_EACH_TORCH`."""
    installed, listed = {*operator_names(), *module_names()}, {*OPERATORS, *MODULES}
    assert installed - listed == set()
    assert listed - installed - NOT_IN_EACH_TORCH == set()


def test_databases_leave_the_process_as_it_is() -> None:
    operator_names(), module_names()
    assert not torch.backends.flags_frozen()
    assert hypothesis.settings.default.derandomize


def test_obstacles_are_of_operators_and_modules() -> None:
    assert set(OPERATOR_OBSTACLES) <= set(OPERATORS)
    assert set(MODULE_OBSTACLES) <= set(MODULES)


def skip_without(name: str, names: Callable[[], list[str]]) -> None:
    if name in NOT_IN_EACH_TORCH and name not in names():
        pytest.skip(f"torch {torch.__version__} does not list {name}")


def faults(cases: Iterable[Case], known: tuple[str, ...], *, is_whole: bool) -> list[str]:
    outcomes = [try_everything(case, thorough=is_whole) for case in cases]
    return faults_of(outcomes, known, is_whole=is_whole)


def some_cases(make: Callable[..., Iterator[Case]], name: str, always: Sequence[str]) -> list[Case]:
    """Return one case by lot, or two for each dtype but bfloat16 for names that were once wrong."""
    if name in always:
        return [case for dtype in DTYPES[:2] for case in islice(make(name, NUM_SAMPLES, (dtype,)), 2)]
    lots = random.Random(f"{SEED} {name}")
    # Saves and their times do not depend on the dtype, so it is mostly float32.
    dtypes = [torch.float32, lots.choice(DTYPES)]
    cases = next(
        filter(None, (list(make(name, NUM_SAMPLES, (dtype,))) for dtype in (lots.choice(dtypes), *DTYPES))), []
    )
    return [lots.choice(cases)] if cases else []
